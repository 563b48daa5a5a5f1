"""A recorder in processes that fork, load data and end: nothing is inherited, and nothing crashes."""

from __future__ import annotations

import pytest

from tests.support.recording import run_python

FORK = """
    recorder, step, kept = Recorder("cpu"), trainer(optimizes=False), []
    recorder.begin(Detail.TENSORS)
    step()
    with recorder.suspended:
        kept.append(torch.ones(1000))
    busy, stop = threading.Barrier(3), threading.Event()

    def work():  # holds the core's locks as often as can be
        torch.ones(100).exp_()  # the first takes a lock of torch's, for which a child would wait for ever
        busy.wait()
        while not stop.is_set():
            torch.ones(100).exp_()

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    busy.wait()
    for _ in range(20):
        child = os.fork()
        if not child:
            assert cpu_allocator() == allocator
            core = native.load()
            before = core.tracked_bytes()
            core.take_sequence()
            step()
            kept.append(torch.ones(1000))
            assert core.take_sequence()[1] == 0 and core.tracked_bytes() == before
            core.take_requests()
            kept.clear()
            assert core.tracked_bytes() == before - 4000 and core.take_requests() == b"", "seen, and not recorded"
            second = Recorder("cpu")
            assert record(second, step, Detail.TENSORS).replays_exactly()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stop.set()
    [thread.join() for thread in threads]
    names = sequence(recorder, step)
    trace = recorder.end(Fingerprint(), ())
    assert trace.replays_exactly(), "the parent goes on"
    recorded = without_accumulation([trace.names[name] for name in trace.operators["name"]])
    assert recorded[-len(names):] == names
    recorder.stop()
    assert not callbacks() and cpu_allocator() == allocator
"""


def test_forked_child_inherits_no_recorder_and_both_processes_train_on() -> None:
    run_python(FORK)


def test_data_loader_workers_inherit_no_recorder() -> None:
    run_python(
        """
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                torch.ones(1)
                assert native.load().take_sequence()[1] == 0 and cpu_allocator() == allocator
                return torch.full((4,), float(index))

        recorder = Recorder("cpu")
        total = []
        loader = DataLoader(Data(), 2, num_workers=2, multiprocessing_context="fork")
        step = lambda: total.extend(sum(batch) for batch in loader)
        trace = record(recorder, step, Detail.TENSORS)
        assert sum(total).tolist() == [28.0] * 4
        assert trace.replays_exactly()
        del recorder
        gc.collect()
        assert not callbacks() and cpu_allocator() == allocator
        """
    )


LONG = ("sys.exit(3)", "raise KeyboardInterrupt", "os._exit(3)")


@pytest.mark.parametrize("ending", ["", *(pytest.param(ending, marks=pytest.mark.long) for ending in LONG)])
def test_process_that_ends_while_recording_exits_cleanly(ending: str) -> None:
    script = f"""
        recorder = Recorder("cpu")
        recorder.begin(Detail.TENSORS)
        step = trainer(optimizes=False)
        step()
        kept = [torch.ones(1000).exp()]
        torch.keeps_it = torch.ones(1000).exp()

        def work():
            kept.append(torch.ones(100).exp_())
            worked.set()
            threading.Event().wait()  # torch itself aborts where a thread runs an operator as the process ends

        worked = threading.Event()
        threading.Thread(target=work, daemon=True).start()
        step()
        worked.wait()
        {ending}
        """
    code = {"sys.exit(3)": 3, "os._exit(3)": 3, "raise KeyboardInterrupt": -2}.get(ending, 0)
    run_python(script, code=code)
