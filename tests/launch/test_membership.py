"""Which processes of an elastic job train together, as the launcher decides."""

import time

import pytest

from tnt_jax.launch.membership import Membership


class Actions:
    """Notes what the launcher would do."""

    def __init__(self):
        self.told, self.started, self.killed, self.shown, self.said = [], [], [], [], []
        self.given_up = None

    def tell(self, rank, **fields):
        self.told.append((rank, fields))

    def start(self, rank):
        self.started.append(rank)

    def kill(self, rank):
        self.killed.append(rank)

    def show(self, rank):
        self.shown.append(rank)

    def say(self, text):
        self.said.append(text)

    def give_up(self, reason):
        self.given_up = reason

    def take(self, kind):
        """Returns and forgets what was told of one kind, by rank."""
        found = {rank: fields for rank, fields in self.told if fields["kind"] == kind}
        self.told = [item for item in self.told if item[1]["kind"] != kind]
        return found


def ready(call=0, done=(5, 0), why=""):
    return {
        "kind": "ready",
        "call": call,
        "done": list(done),
        "why": why,
        "local_address": "127.0.0.1:1",
        "address": "far:1",
    }


def can_change(obstacle="", call=0, sizes=None):
    return {"kind": "can_change", "obstacle": obstacle, "call": call, "sizes": sizes}


def job(ranks=3, hosts=1, sizes=None, **options):
    actions = Actions()
    of_rank = {rank: f"host{rank % hosts}" for rank in range(ranks)}
    membership = Membership(of_rank, **{"at_least": 1, "silence_s": 5.0} | options, actions=actions)
    membership.heard(0, can_change(sizes=sizes))
    return membership, actions


def test_survivors_form_the_next_generation_once_all_are_ready():
    membership, actions = job()
    assert membership.lost(2, "was killed")
    assert sorted(actions.take("interrupt")) == [0, 1]
    assert actions.started == [2]
    membership.heard(0, ready())
    assert not actions.take("form")
    membership.heard(1, ready())
    formed = actions.take("form")
    assert {rank: (f["index"], f["size"], f["number"]) for rank, f in formed.items()} == {
        0: (0, 2, 1),
        1: (1, 2, 1),
    }
    assert formed[0]["address"] == "127.0.0.1:1"


def test_the_lowest_process_that_lives_leads_and_is_shown():
    membership, actions = job()
    membership.lost(0, "was killed")
    for rank in (2, 1):
        membership.heard(rank, ready())
    formed = actions.take("form")
    assert [formed[rank]["index"] for rank in (1, 2)] == [0, 1]
    assert actions.shown == [1]


def test_a_process_that_joins_comes_last_and_takes_the_newest_state():
    membership, actions = job()
    membership.lost(0, "was killed")
    for rank, step in ((1, 7), (2, 8)):
        membership.heard(rank, ready(done=(step, 0)))
    assert actions.take("form")[1]["source"] == 1  # Rank 2 has done a step more.
    membership.heard(0, {"kind": "here"})
    assert actions.take("calls")[0]["results"] == []
    actions.take("interrupt")
    membership.heard(0, ready(done=(0, 0)))
    assert sorted(actions.take("interrupt")) == [1, 2]
    for rank in (1, 2):
        membership.heard(rank, ready(done=(9, 0)) | {"number": 1})
    formed = actions.take("form")
    assert [formed[rank]["index"] for rank in (1, 2, 0)] == [0, 1, 2]
    assert formed[0]["source"] == 0


def test_the_step_that_runs_is_not_lost_where_a_process_joins(monkeypatch):
    membership, actions = job()
    membership.lost(2, "was killed")
    assert all(told["at_once"] for told in actions.take("interrupt").values())
    for rank in (0, 1):
        membership.heard(rank, ready())
    actions.take("form")
    membership.heard(2, {"kind": "here"})
    membership.heard(2, ready(done=()))
    assert not any(told["at_once"] for told in actions.take("interrupt").values())
    now = time.monotonic()
    for later in (0.0, 10.0):  # The others may be in a long step.
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        for rank in range(3):
            membership.heard(rank, {"kind": "here"})
        membership.tick()
        assert not actions.take("interrupt")
    membership.heard(0, ready() | {"number": 1})
    # Rank 1 has begun a step that process 0 does not make.
    monkeypatch.setattr(time, "monotonic", lambda: now + 10.6)
    for rank in range(3):
        membership.heard(rank, {"kind": "here"})
    membership.tick()
    told = actions.take("interrupt")
    assert told[1]["at_once"]
    assert told[1]["number"] == 1
    membership.tick()
    assert not actions.take("interrupt")
    membership.heard(1, ready() | {"number": 1})
    assert sorted(actions.take("form")) == [0, 1, 2]


def test_a_process_that_is_stuck_where_another_joins_is_ended():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(2, {"kind": "here"})
    membership.heard(2, ready(done=()))
    stuck = {"kind": "stuck", "number": 1, "index": 1, "why": "process 1 makes no progress"}
    membership.heard(0, stuck)
    assert actions.killed == [1]


def test_what_a_process_reports_late_of_an_earlier_generation_ends_none(monkeypatch):
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    actions.take("interrupt")
    membership.heard(0, ready() | {"number": 0})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2)
    membership.tick()
    assert not actions.take("interrupt")


def test_a_call_that_ends_with_the_step_after_which_a_process_was_to_join_ends_as_it_is():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(0, {"kind": "on", "place": "step 1"})
    membership.heard(2, {"kind": "here"})
    membership.heard(2, ready(done=()))
    actions.take("interrupt")
    membership.heard(0, can_change("Model.fit has ended"))
    assert {told["why"] for told in actions.take("interrupt").values()} == {""}
    # Nothing waits for the others any more.
    membership.heard(0, {"kind": "ended", "call": 0, "result": {}})
    assert not membership.lost(1, "was killed")
    assert "Training cannot go on in place: Model.fit has ended" in actions.said[-1]


def test_a_loss_while_a_process_joins_ends_the_step_at_once():
    membership, actions = job(4)
    membership.lost(3, "was killed")
    for rank in range(3):
        membership.heard(rank, ready())
    membership.heard(3, {"kind": "here"})
    membership.heard(3, ready(done=()))
    actions.take("interrupt")
    membership.lost(1, "was killed")
    assert {r: told["at_once"] for r, told in actions.take("interrupt").items()} == {
        0: True,
        2: True,
    }


def test_a_second_death_while_the_others_get_ready_is_no_second_generation():
    membership, actions = job(4)
    membership.lost(2, "was killed")
    membership.heard(0, ready())
    membership.lost(3, "was killed")
    assert not actions.take("form")
    membership.heard(1, ready())
    assert sorted(actions.take("form")) == [0, 1]


def test_a_death_of_the_last_one_that_was_not_ready_forms_the_generation():
    membership, actions = job()
    membership.lost(2, "was killed")
    membership.heard(0, ready())
    membership.lost(1, "was killed")
    assert sorted(actions.take("form")) == [0]


def test_a_death_before_training_ends_the_job_as_without_elastic():
    actions = Actions()
    membership = Membership({0: "a", 1: "a"}, at_least=1, silence_s=5.0, actions=actions)
    assert not membership.lost(1, "was killed")
    assert not actions.told
    (line,) = actions.said
    assert line == (
        "Process 1 on a was killed. Training cannot go on in place: no call of fit, evaluate or "
        "predict has begun."
    )


def test_with_too_few_processes_training_waits_for_one_that_joins():
    membership, actions = job(2, at_least=2)
    membership.lost(1, "was killed")
    membership.heard(0, ready())
    assert not actions.take("form")
    assert actions.given_up is None
    membership.heard(1, ready())
    assert sorted(actions.take("form")) == [0, 1]


def test_too_few_processes_without_one_to_come_end_the_job():
    membership, actions = job(2, hosts=2, at_least=2)
    membership.lost_host("host1", "no answer")
    membership.heard(0, ready())
    assert "fewer than 2" in actions.given_up


def test_without_survivors_the_job_ends():
    membership, actions = job(2)
    membership.lost(0, "was killed")
    membership.lost(1, "was killed")
    assert "no process is left" in actions.given_up


def test_a_process_that_is_lost_early_three_times_is_left_out():
    membership, actions = job()
    for _ in range(3):
        membership.lost(2, "was killed")
    assert actions.started == [2, 2]
    assert "left out" in actions.said[-1]


def test_a_process_that_refuses_is_not_started_again():
    membership, actions = job()
    membership.lost(2, "was killed")
    membership.heard(2, {"kind": "refuses", "why": "other data"})
    assert membership.is_joining(2)
    membership.lost(2, "failed with exit code 1")
    assert actions.started == [2]
    assert any("other data" in line for line in actions.said)


def test_a_silent_process_is_killed(monkeypatch):
    membership, actions = job()
    for rank in range(3):
        membership.heard(rank, {"kind": "here"})
    now = [time.monotonic() + 100]
    monkeypatch.setattr("tnt_jax.launch.membership.time.monotonic", lambda: now[0])
    membership.tick()  # After a pause of its own nobody is silent.
    for _ in range(6):
        now[0] += 1
        for rank in (0, 1):
            membership.heard(rank, {"kind": "here"})
        membership.tick()
    assert actions.killed == [2]


def test_nobody_joins_while_the_generation_cannot_change():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    actions.take("interrupt")
    membership.heard(0, can_change("fit has ended"))
    membership.heard(2, ready())
    assert not actions.take("interrupt")
    membership.heard(0, can_change())
    assert sorted(actions.take("interrupt")) == [0, 1]


def test_a_process_that_joins_learns_of_calls_that_end_meanwhile():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(2, {"kind": "here"})
    actions.take("calls")
    membership.heard(1, {"kind": "ended", "call": 0, "result": {"value": 1}})
    membership.heard(0, {"kind": "ended", "call": 0, "result": {"value": 1}})
    assert actions.take("calls")[2]["results"] == [{"value": 1}]


def test_processes_in_different_calls_cannot_go_on():
    membership, actions = job()
    membership.lost(2, "was killed")
    membership.heard(0, ready(call=1))
    membership.heard(1, ready(call=0))
    assert "different calls" in actions.given_up


def test_generations_without_a_step_end_the_job():
    membership, actions = job(2)
    number = 0
    while actions.given_up is None and number < 20:
        for rank in (0, 1):
            membership.heard(rank, ready(why="a connection broke") | {"number": number})
        number += 1
    assert number < 12
    assert "no step" in actions.given_up


def test_the_line_on_a_loss_says_who_what_and_for_how_long():
    membership, actions = job()
    membership.lost(2, "was ended by signal 9 (SIGKILL)")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(0, {"kind": "on", "place": "step 12 of epoch 3"})
    (line,) = actions.said
    assert "process 2 on host0 was ended by signal 9 (SIGKILL)" in line
    assert "2 process(es)" in line
    assert "step 12 of epoch 3" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_that_ends_ends_those_that_were_to_join(rank):
    membership, actions = job()
    membership.lost(2, "was killed")
    for other in (0, 1):
        membership.heard(other, ready())
    membership.ended(rank)
    assert actions.killed == [2]
    assert membership.lost(2, "was killed")
    assert actions.started == [2]
    assert not membership.lost(1 - rank, "was killed")


def test_one_that_joins_too_few_others_is_not_waited_for():
    membership, actions = job(3, hosts=3, at_least=3)
    membership.lost_host("host2", "no answer")
    membership.lost(1, "was killed")
    membership.heard(0, ready())
    assert actions.given_up is None
    membership.heard(1, ready())
    assert "2 process(es) are left, fewer than 3" in actions.given_up


def test_one_that_ends_before_it_joins_is_not_waited_for():
    membership, actions = job(2, at_least=2)
    membership.lost(1, "was killed")
    membership.heard(0, ready())
    membership.ended(1)
    assert "1 process(es) are left, fewer than 2" in actions.given_up


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_process_that_waits_for_one_that_has_ended_ends_the_job(ends_first):
    membership, actions = job()
    membership.lost(2, "was killed")
    happens = [lambda: membership.ended(0), lambda: membership.heard(1, ready())]
    for happen in happens if ends_first else reversed(happens):
        assert actions.given_up is None
        happen()
    assert "process 2 on host0 was killed" in actions.given_up
    assert "end of its script" in actions.given_up


def test_each_process_that_joins_is_named_once():
    membership, actions = job(4)
    for rank in (2, 3):
        membership.lost(rank, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    for rank in (2, 3):
        membership.heard(rank, ready())
    for rank in (0, 1):
        membership.heard(rank, ready() | {"number": 1})
    membership.heard(0, {"kind": "on", "place": "step 9 of epoch 1"})
    (line,) = actions.said
    assert line.count("process 2 joins") == line.count("process 3 joins") == 1


def test_losses_of_processes_that_lasted_do_not_count_as_early(monkeypatch):
    membership, actions = job()
    began = time.monotonic()
    now = [began]
    monkeypatch.setattr("tnt_jax.launch.membership.time.monotonic", lambda: now[0])
    now[0] += 1000
    for _ in range(3):
        membership.lost(2, "was killed")
    assert actions.started == [2, 2, 2]
    membership.lost(2, "was killed")
    assert actions.started == [2, 2, 2]


def test_numbers_of_processes_that_the_model_cannot_use_wait_for_a_replacement():
    membership, actions = job(4, sizes=[1, 2, 4])
    membership.lost(3, "was killed")
    for rank in range(3):
        membership.heard(rank, ready())
    assert not actions.take("form")
    membership.heard(3, ready(done=()))
    assert sorted(actions.take("form")) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_early", [True, False])
def test_processes_join_together_where_the_model_needs_both(is_early):
    membership, actions = job(4, sizes=[1, 2, 4])
    for rank in (2, 3):
        membership.lost(rank, "was killed")
    for rank in (2, 0, 1) if is_early else (0, 1, 2):
        if rank == 2 and not is_early:
            actions.take("interrupt")
        membership.heard(rank, ready(done=() if rank == 2 else (5, 0)))
    assert sorted(actions.take("form")) == [0, 1]
    assert is_early or not actions.take("interrupt")
    membership.heard(3, ready(done=()))
    assert 0 in actions.take("interrupt")
    for rank in (0, 1):
        membership.heard(rank, ready() | {"number": 1})
    assert sorted(actions.take("form")) == [0, 1, 2, 3]


def test_numbers_that_nobody_can_complete_end_the_job():
    membership, actions = job(4, hosts=4, sizes=[1, 2, 4])
    membership.lost_host("host3", "no answer")
    for rank in range(3):
        membership.heard(rank, ready())
    expected = "3 process(es) are left, and the model computes on 1 or 2 or 4 only"
    assert expected in actions.given_up


def test_one_that_has_not_taken_the_state_does_not_train_alone():
    membership, actions = job(2)
    membership.lost(1, "was killed")
    membership.heard(0, ready())
    membership.heard(1, ready(done=()))
    membership.heard(0, ready() | {"number": 1})
    assert sorted(actions.take("form")) == [0, 1]
    membership.lost(0, "was killed")
    membership.heard(1, ready(done=()) | {"number": 2})
    assert "no process is left that has the state of training" in actions.given_up


def test_one_that_waited_for_a_call_that_has_ended_does_not_interrupt_the_next():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(0, can_change("fit has ended"))
    membership.heard(2, ready(done=()))
    membership.heard(0, {"kind": "ended", "call": 0, "result": {"value": 1}})
    actions.take("interrupt")
    membership.heard(0, can_change(call=1))
    assert not actions.take("interrupt")


def test_nobody_joins_in_a_call_that_does_not_train():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.heard(2, {"kind": "here"})
    membership.heard(0, {"kind": "ended", "call": 0, "result": {"value": 1}})
    membership.heard(0, can_change(call=-1))
    actions.take("form")
    assert actions.take("calls")[2]["latest"] == 0
    membership.lost(1, "was killed")
    membership.heard(0, ready(call=1))
    assert sorted(actions.take("form")) == [0]


def test_processes_of_a_host_that_comes_back_are_started_again():
    membership, actions = job(2, hosts=2)
    membership.lost_host("host1", "no answer")
    membership.heard(0, ready())
    assert not actions.started
    assert membership.may_return("host1")
    membership.returned_host("host1")
    assert actions.started == [1]
    actions.take("interrupt")
    membership.heard(1, ready(done=()))
    assert sorted(actions.take("interrupt")) == [0]


def test_a_host_that_is_lost_three_times_does_not_come_back():
    membership, _ = job(2, hosts=2)
    for _ in range(3):
        assert membership.may_return("host1")
        membership.lost_host("host1", "no answer")
        membership.returned_host("host1")
    assert not membership.may_return("host1")


def test_what_happened_before_a_generation_did_a_step_is_said_with_the_next():
    membership, actions = job()
    membership.lost(2, "was killed")
    for rank in (0, 1):
        membership.heard(rank, ready())
    membership.lost(1, "was stopped")
    membership.heard(0, ready() | {"number": 1})
    membership.heard(0, {"kind": "on", "place": "step 9 of epoch 1"})
    (line,) = actions.said
    assert "process 2 on host0 was killed; process 1 on host0 was stopped. Generation 2" in line
