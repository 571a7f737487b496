"""Drop one wait from a valid schedule and let the verifier say what could now go wrong."""

from mpk import Compiler, frontend
from mpk.passes.verify import find_fault

graph = Compiler(target_hardware="cpp", workers=4).lower_model(frontend.load("SmolLM2-135M", shapes=True))
assert find_fault(graph) is None
victim = next(t for t in graph.tasks if graph.operator(t).name == "l3.down" and t.waits)
victim.waits = ()
fault = find_fault(graph)
assert fault is not None
print(fault.message)
