"""All names of jax, jaxlib, torch and torch2jax that their documentation does not promise, each with what stands in for it.

One module a package: `jax`, `torch`, `torch2jax`. `python` has the code objects of functions. `lookup.private` finds a name when it is
imported, so that no call of a step asks again; a comment beside each name says what breaks without it. Not here: attributes that torch
shows to subclasses of `nn.Module` and `Optimizer` (`_buffers`, `_forward_hooks`, `_optimizer_step_pre_hooks`,
`_step_supports_amp_scaling`), names of operators in the tables of `_tracing/ops`, options and passes of XLA (`_xla`), and the primitives
of jaxprs.

docs/internals/upstream.md says which public name each of them waits for.
"""
