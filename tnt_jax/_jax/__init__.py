"""Every name of JAX that is private, experimental or differs between the supported versions.

The rest of the package calls JAX through its documented API and these names; each says with which
versions it was checked and what would replace it.
"""

# Documented, but experimental. Checked with JAX 0.10.0 and 0.10.2. A jitted jax.lax.all_gather over
# all devices would replace both.
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

# Outside JAX's promise of compatibility. Checked with JAX 0.10.0 and 0.10.2. There is no other
# public way to look into a traced program or to change it.
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun, jaxprs_in_params

# Outside JAX's promise of compatibility. Checked with JAX 0.10.0 and 0.10.2. Without them, dropout
# by row of the global batch would need a generator of its own in every layer.
from jax.extend.random import define_prng_impl, threefry2x32_p, threefry_prng_impl

from tnt_jax._jax.arrays import (
    DATA_AXIS,
    FSDP_AXIS,
    STAGE_AXIS,
    abstract_data_mesh,
    all_gather_invariant,
    finished,
    from_local_parts,
    is_varying,
    local_copy,
    local_parts,
    local_ranks,
    make_data_mesh,
    make_varying,
    num_ranks,
    one_rank_mesh,
    put,
    rank_axes,
    replicate,
    shard_map,
    shard_rows,
    varying_axes,
    varying_axes_of,
    zeros_like,
)
from tnt_jax._jax.compiler import (
    convolution_options,
    deterministic_options,
    options_of_one_run,
)
from tnt_jax._jax.frames import compiles, is_of_jax
from tnt_jax._jax.gathered import keep_all_but_gathered
from tnt_jax._jax.host_call import called_function, host_call
from tnt_jax._jax.kept_programs import keep_programs_of_each_process
from tnt_jax._jax.mapped import mapped_axes, tracks_varying, was_summed
from tnt_jax._jax.processes import (
    await_disconnection,
    backends_are_initialized,
    before_abort,
    coordination_client,
    coordinator_listens,
    is_distributed,
    skip_cleanup,
    value_of_key,
)
from tnt_jax._jax.profile import Recording, profile
from tnt_jax._jax.programs import (
    CASTS,
    PLAIN,
    called_program,
    check_axes,
    check_local,
    communicates,
    computes_in_half,
    convolves,
    function_of,
    is_collective,
    last_activations,
    loop_sizes,
    needed_constants,
    needed_operands,
    run_equation,
    unjitted,
    without_dead_code,
)

__all__ = [
    "CASTS",
    "DATA_AXIS",
    "FSDP_AXIS",
    "PLAIN",
    "STAGE_AXIS",
    "ClosedJaxpr",
    "Jaxpr",
    "Literal",
    "Recording",
    "Var",
    "abstract_data_mesh",
    "all_gather_invariant",
    "await_disconnection",
    "backends_are_initialized",
    "before_abort",
    "broadcast_one_to_all",
    "called_function",
    "called_program",
    "check_axes",
    "check_local",
    "communicates",
    "compiles",
    "computes_in_half",
    "convolution_options",
    "convolves",
    "coordination_client",
    "coordinator_listens",
    "define_prng_impl",
    "deterministic_options",
    "finished",
    "from_local_parts",
    "function_of",
    "host_call",
    "is_collective",
    "is_distributed",
    "is_of_jax",
    "is_varying",
    "jaxpr_as_fun",
    "jaxprs_in_params",
    "keep_all_but_gathered",
    "keep_programs_of_each_process",
    "last_activations",
    "local_copy",
    "local_parts",
    "local_ranks",
    "loop_sizes",
    "make_data_mesh",
    "make_varying",
    "mapped_axes",
    "needed_constants",
    "needed_operands",
    "num_ranks",
    "one_rank_mesh",
    "options_of_one_run",
    "process_allgather",
    "profile",
    "put",
    "rank_axes",
    "replicate",
    "run_equation",
    "shard_map",
    "shard_rows",
    "skip_cleanup",
    "threefry2x32_p",
    "threefry_prng_impl",
    "tracks_varying",
    "unjitted",
    "value_of_key",
    "varying_axes",
    "varying_axes_of",
    "was_summed",
    "without_dead_code",
    "zeros_like",
]
