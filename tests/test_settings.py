import pytest

from tnt_jax.settings import Settings, read_settings

JOB = {"TNT_COORDINATOR_ADDRESS": "node1:1234", "TNT_NUM_PROCESSES": "4", "TNT_PROCESS_ID": "3"}


def test_an_empty_environment_gives_the_defaults():
    assert read_settings({}) == Settings()


def test_all_variables_are_read():
    environ = JOB | {
        "TNT_INIT_TIMEOUT_S": "7", "TNT_HEARTBEAT_TIMEOUT_S": "8", "TNT_LOG_LEVEL": "debug",
        "TNT_LOG_ON_ALL_DEVICES": "1",
        "TNT_OUTPUT_ON_ALL_DEVICES": "True", "TNT_FUSION_THRESHOLD": "0",
        "TNT_LAUNCHED_AT": "12.500",
        "TNT_TUNE_STEPS": "5", "TNT_PLAN": "1", "TNT_STALL_WARNING_S": "6", "TNT_STALL_TIMEOUT": "0",
        "TNT_RESTART_COUNT": "2", "TNT_CHECKPOINT_DIR": "runs/a", "TNT_CHECKPOINT_EVERY": "30s",
        "TNT_SCALE_STEPS": "9", "TNT_SCALE_FROM": "2", "TNT_SCALE_WEAK": "1",
        "TNT_RECORD_STEPS": "4", "TNT_RECORD_AS": "passes",
        "TNT_EXPLAIN_STEPS": "3", "TNT_EXPLAIN_ROUNDS": "2",
        "TNT_DEVICE_MEMORY": "1.5GiB", "TNT_JOB_SECRET": "s" * 32,
    }  # fmt: skip
    assert read_settings(environ) == Settings(
        "node1:1234", 4, 3, 7, 8, "DEBUG", True, True, 0, 12.5, 5, True, 6, 0,
        checkpoint_dir="runs/a", checkpoint_every="30s", restart_count=2,
        goodput="runs/a/goodput.jsonl", scale_steps=9, scale_from=2, scale_weak=True, record_steps=4, record_as="passes",
        explain_steps=3, explain_rounds=2,
        device_memory=3 * 2**29, job_secret="s" * 32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"TNT_COORDINATOR_ADDRESS": "node1:1"},
            "set together, but TNT_NUM_PROCESSES and TNT_PROCESS_ID are missing",
        ),
        ({k: v for k, v in JOB.items() if k != "TNT_PROCESS_ID"}, "TNT_PROCESS_ID is missing"),
        (
            JOB | {"TNT_PROCESS_ID": "4"},
            r"TNT_PROCESS_ID \(4\) must be below TNT_NUM_PROCESSES \(4\)",
        ),
        (JOB | {"TNT_COORDINATOR_ADDRESS": "node1"}, "must be host:port.*'node1'"),
        (JOB | {"TNT_COORDINATOR_ADDRESS": "node1:99999"}, "must be host:port"),
        (JOB | {"TNT_NUM_PROCESSES": "two"}, "integer of at least 1, but is 'two'"),
        ({"TNT_FUSION_THRESHOLD": "-1"}, "number of KiB of at least 0, or xla, but is '-1'"),
        ({"TNT_SCALE_STEPS": "0"}, "integer of at least 1, but is '0'"),
        ({"TNT_RECORD_AS": "slow"}, "TNT_RECORD_AS must be one of plain, .* not 'slow'"),
        ({"TNT_DEVICE_MEMORY": "80"}, "TNT_DEVICE_MEMORY must be a size such as 80GB .* is '80'"),
        ({"TNT_DEVICE_MEMORY": "0GB"}, "must be a size such as 80GB or 40GiB, but is '0GB'"),
        ({"TNT_JOB_SECRET": "guess"}, "random text of at least 32 characters, but has 5"),
        ({"TNT_TUNE_STEPS": "0"}, "integer of at least 1, but is '0'"),
        (
            {"TNT_CHECKPOINT_EVERY": "0"},
            "TNT_CHECKPOINT_EVERY: .* batches from 1, or a time .* '0'",
        ),
        ({"TNT_LOG_LEVEL": "LOUD"}, "must be one of DEBUG, INFO, WARNING, ERROR, but is 'LOUD'"),
        ({"TNT_LOG_ON_ALL_DEVICES": "maybe"}, "must be one of 1, true"),
    ],
)
def test_invalid_variables_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        read_settings(environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * 10**9), ("40 GiB", 40 * 2**30), ("66kB", 66000), ("512B", 512)],
)
def test_sizes_have_decimal_and_binary_units(text, expected):
    assert read_settings({"TNT_DEVICE_MEMORY": text}).device_memory == expected
