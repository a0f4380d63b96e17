"""Values that `jax.vmap` may not give a further axis, for what it would fail on further on."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def refuse_vmap(tree: Any) -> Any:
  """`tree`, whose tracers, tangents and cotangents `jax.vmap` refuses, with a reason."""
  traced = lambda x: isinstance(x, jax.core.Tracer)  # noqa: E731
  return jax.tree.map(lambda x: _unmapped_p.bind(x) if traced(x) else x, tree)


def _refuse(*args: Any, **kwargs: Any) -> Any:
  raise NotImplementedError(
    "in_place=True adds gradients to references, which jax.vmap cannot give a further axis, and"
    " jax.jacfwd, jax.jacrev and jax.hessian call it: pass in_place=False, or take jax.lax.map."
  )


# A primitive of our own: none of JAX's can be differentiated both ways and not be mapped.
_unmapped_p = Primitive("unmapped")
_unmapped_p.def_impl(lambda x: x)
_unmapped_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_unmapped_p, lambda ctx, x: [x])
ad.deflinear2(_unmapped_p, lambda ct, x: [_unmapped_p.bind(ct)])
batching.primitive_batchers[_unmapped_p] = _refuse
