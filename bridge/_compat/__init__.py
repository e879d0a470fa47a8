"""Names of jax, jaxlib, torch and torch2jax that their documentation does not promise, each with a fallback.

There is one module a package: `jax`, `torch`, `torch2jax`; `python` has the code objects of functions. `lookup.private` looks a name up at
import, so that a step does not look it up again. A comment beside each name says what is lost without it.

Other private names are used where they belong: attributes that torch shows to subclasses of `nn.Module` and `Optimizer` (`_buffers`,
`_forward_hooks`, `_optimizer_step_pre_hooks`, `_step_supports_amp_scaling`), names of operators (tables of `_tracing/ops`), options and
passes of XLA (`_xla`), the primitives of jaxprs, and `get_stream_for_external_ready_events` of a GPU (`_interop/dlpack.py`).

docs/internals/upstream.md says what is lost without each name, and which public name would replace it.
"""
