"""What a model becomes on 132 SMs: tasks, events, critical path; no weights are needed."""

import tempfile
from pathlib import Path

from mpk import Compiler, SMTaskGraph, frontend

model = frontend.load("Llama-3.2-1B", shapes=True)
graph = Compiler(target_hardware="h200").lower_model(model)
for key, value in graph.statistics().items():
    print(f"{key}: {value}")

done: list[int] = []
for wave in range(3):
    ready = graph.ready_tasks(done)
    print(f"wave {wave}: {len(ready)} tasks ready, the first is {graph.operator(ready[0]).name}")
    done += ready

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "llama-1b.mpk"
    graph.save(str(file))
    assert SMTaskGraph.load(str(file)).statistics() == graph.statistics()
    print(f"saved and loaded again: {file.stat().st_size / 1e6:.1f} MB")
