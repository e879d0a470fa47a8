"""No definition has one of the private words that the terms of docs/internals/glossary.md have replaced."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.quick

WORDS = """
Ahead Alike AllPlaces Arrays Asks Block Borrowed Cells Changeable Columns Exchange Extra Facts Field Flat Forward Given GroupedOptimizer
Keeper Kept Keys Launches Layout Leaf Leaves Memory Number Old Operands Outcome Pack Parts Piece Pieces Place Places Plan Problem Program
Reader Ready Recording Row Rows Rule Same Scaling Scattered Shapeless Shared Sight Situation Slot Spec StandIn States Task Trace Traced
Views Watch Window _Flight _Forward _Kind _Known _Place _Program _Recorded _Transformed

AHEAD BESIDE EQUALS FEWEST GATHERED IN_TORCH LOOPED ON_ONE_CORE SINGLY_ON TRACE VALUE_FN
_LITTLE _OTHERS

abstract active alike anew arrangement at_once begin_eager begins begun begun_early behind_torch beside between by_bits by_program
calls_back cannot_own caster check_apart consequences counts_holders cut_off decayed decide decisive differs divided eager ends_before
evenly everything family fewer follow followed for_each found_by found_in fuses give given_up glance gradient_once halved hooked
in_any_order in_parts in_rows in_turn inlined is_looped is_ragged keeps_elements landing looked_at measure near near_and_all no_graph
of_barriers of_counting of_packs of_parts of_training of_update on_one_core once one_type_each over_rows pack pack_key pack_width packed
parted piece pullback pushforward renewed restless salvage shrunk singly slice_of slices sort_key spreads stand_in stay stepped sums_up
threads_end turns uncollected undisturbed unless unnoticed unread value_needed where_now windows with_memory written_through
_alike_of _apart _are_few _as_left _begun_early _collected _distributed _divided _double _found _glance _group_signature _look _moves
_placed_anew _prunes _question _quick _read_ahead _recent _salvage _settle _settled _stamp _take_back _taken_out _unclaimed _unfit
_where_live
"""
RETIRED = set(WORDS.split())
# Their code waits for another form of the compiler, and their names go with it.
EXEMPT = {"joint_update", "leaf_update", "batch_rows", "batch_scalars", "per_kind", "hoist", "outline"}
EXEMPT_PATHS = {"bridge/_compiler/passes/reductions.py"}


def definitions(tree):
    """Yield each name that a module defines, with its line: classes, functions, parameters, attributes and module variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    yield from ((x.id, x.lineno) for target in targets for x in ast.walk(target) if isinstance(x, ast.Name))


def retired(source):
    return sorted({(line, name) for name, line in definitions(ast.parse(source)) if name in RETIRED})


@pytest.mark.parametrize("package", ["bridge", "maskbridge", "torch_api"])
def test_no_definition_has_a_retired_name(package):
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if path.stem not in EXEMPT and name not in EXEMPT_PATHS:
            found += [f"{name}:{line}: {word}" for line, word in retired(path.read_text())]
    assert not found, "docs/internals/glossary.md has the terms"


def test_each_kind_of_definition_is_found():
    source = "class Pack:\n    memory: int\n    def glance(self, anew):\n        self.begun = anew\nGATHERED = 1\n"
    assert retired(source) == [(1, "Pack"), (3, "anew"), (3, "glance"), (4, "begun"), (5, "GATHERED")]
