"""Every name of JAX that is private, experimental or differs between the supported versions.

The rest of the package calls JAX through its documented API and these names; each says with which
versions it was checked and what would replace it. Where one is missing, plain JAX is used, with one
warning that says what is lost (`fallbacks.py`).
"""

from tnt_jax._jax.arrays import (
    DATA_AXIS,
    FSDP_AXIS,
    RANK_AXES,
    STAGE_AXIS,
    abstract_data_mesh,
    all_gather_invariant,
    finished,
    from_local_parts,
    is_key,
    is_varying,
    key_words,
    kind_of,
    local_copy,
    local_parts,
    local_ranks,
    make_data_mesh,
    make_varying,
    num_ranks,
    one_rank_mesh,
    polynomials,
    put,
    rank_axes,
    replicate,
    shard_rows,
    vary,
    varying_axes,
    varying_axes_of,
    zeros_like,
)
from tnt_jax._jax.compiling import (
    compiles,
    convolution_options,
    deterministic_options,
    is_of_jax,
    options_of_one_run,
)
from tnt_jax._jax.kept_programs import keep_programs_of_each_process
from tnt_jax._jax.mapped import (
    keep_all_but_gathered,
    mapped_axes,
    shard_map,
    tracks_varying,
    was_summed,
)
from tnt_jax._jax.memory import ProgramMemory, TracedProgram
from tnt_jax._jax.processes import (
    await_disconnection,
    backends_are_initialized,
    before_abort,
    call_service_by,
    coordination_client,
    coordinator_listens,
    leave_job,
    outlive_service,
    skip_cleanup,
    stop_threads_that_fail,
    value_of_key,
)
from tnt_jax._jax.profile import Recording, profile
from tnt_jax._jax.program_sums import replace_sums
from tnt_jax._jax.programs import (
    CALLS,
    CASTS,
    LIBRARIES,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Values,
    Var,
    bytes_of_products,
    called_program,
    check_axes,
    check_local,
    communicates,
    computes_in_half,
    convolutions_in,
    convolves,
    define_prng_impl,
    draws_in,
    equations_on,
    function_of,
    is_collective,
    jaxpr_as_fun,
    jaxprs_in_params,
    last_activations,
    line_of,
    looked_up,
    loop_sizes,
    needed_operands,
    new_variable,
    operations_of_products,
    run_equation,
    threefry2x32_p,
    threefry_prng_impl,
    unjitted,
    without_dead_code,
)
