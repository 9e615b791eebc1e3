"""`tnt-jax` inside a cluster's own launcher.

It is then one task of `srun`, `mpirun`, an indexed job or a TF_CONFIG cluster.
"""

import os
from collections.abc import Mapping

from tnt_jax.cluster.job import Job
from tnt_jax.launch.child import expand
from tnt_jax.launch.planning.environment import task_environment
from tnt_jax.launch.planning.facts import Facts, Request, inspect_host
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import script_command
from tnt_jax.launch.planning.preflight import find_obstacles
from tnt_jax.launch.processtree import leave_orphans
from tnt_jax.launch.remote.session import HostError


def become_task(job: Job, options: Options, environ: Mapping[str, str]) -> None:
    """Replaces this program by the script, as one process of the cluster's job.

    The process id is `job.process_id`. The cluster shows the output, passes on signals and ends the
    other tasks when one fails.

    Raises:
        HostError: If the script or its interpreter does not exist here.
    """
    command, environment = plan_task(job, options, environ)
    leave_orphans()
    os.execvpe(command[0], command, {**environment, "TNT_TASK_PID": str(os.getpid())})


def refuse_restarts(job: Job, options: Options) -> None:
    """Raises a ValueError if one task among many is to start the job again, which only all can."""
    if options.max_restarts or options.min_hosts:
        raise ValueError(
            f"--max-restarts and --min-hosts need a launcher that starts all processes, but this "
            f"one is one of {job.num_processes} that {job.source} has started. Run tnt-jax once, "
            "in the batch script without srun or mpirun, or have the cluster start the job again: "
            "#SBATCH --requeue and scontrol requeue, or backoffLimit in Kubernetes."
        )


def plan_task(
    job: Job, options: Options, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the command of a task and its whole environment."""
    interpreter = options.interpreter[0] if options.interpreter else ""
    request = Request(
        cwd=os.getcwd(), script=options.script, interpreter=interpreter, environment=dict(environ)
    )
    facts = Facts.from_json(inspect_host(request.to_json()))
    obstacles = find_obstacles({facts.hostname: facts})
    if obstacles:
        raise HostError(obstacles)
    environment = {
        **environ,
        **task_environment(job, facts=facts, options=options, environ=environ),
    }
    for name, value in options.exports:
        environment[name] = expand(value, environment)
    return script_command(options, os.getcwd()), environment
