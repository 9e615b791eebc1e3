"""Ends the remains of a job on its hosts, or lists jobs."""

from collections.abc import Mapping

from tnt_jax.launch.options import Options
from tnt_jax.launch.run import ASK_TIMEOUT_S, job_hosts, open_session


def clean_up(options: Options, environ: Mapping[str, str]) -> int:
    """Ends the processes of the job `options.cleanup` on the hosts of the hostfile or on this one.

    Without an id it lists jobs.

    Returns:
        0 if no process of the job is left, 1 otherwise.
    """
    with open_session(job_hosts(options, environ), options) as session:
        if not options.cleanup:
            print(_describe(session.ask("list_jobs", {}, timeout_s=ASK_TIMEOUT_S)))
            return 0
        arguments = {"job_id": options.cleanup, "force": options.force}
        answers = session.ask("end_job", arguments, timeout_s=ASK_TIMEOUT_S)
    for host, (found, left) in answers.items():
        print(f"{host}: {found - len(left)} of {found} process(es) ended")
        for process in left:
            print(f"  still there: {process}" + ("" if options.force else " (--force kills it)"))
    return int(any(left for _, left in answers.values()))


def _describe(jobs_by_host: dict[str, dict[str, list[str]]]) -> str:
    lines = []
    for host, jobs in jobs_by_host.items():
        for job_id, processes in jobs.items():
            lines.append(f"{host}: job {job_id}")
            lines += [f"  {process}" for process in processes]
    return "\n".join(lines) or "No process of a job is running."
