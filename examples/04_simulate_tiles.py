"""A GEMM, an RMS norm and attention as tiles: one persistent kernel against a kernel per operator, simulated on an H200."""

from mpk.graph.sm_task_graph import Region
from mpk.simulate import MPKMegaKernelEngine, TaskTile

HIDDEN, TILES, HEADS, CONTEXT = 4096, 128, 32, 2048
WIDTH, HEAD = HIDDEN // TILES, HIDDEN // HEADS

whole_input = Region("x", 0, HIDDEN)
gemm = [TaskTile("gemm", reads=(whole_input,), writes=(Region("y", i * WIDTH, (i + 1) * WIDTH),),
                 weight_bytes=WIDTH * HIDDEN * 2, flops=2 * WIDTH * HIDDEN) for i in range(TILES)]
norm = [TaskTile("rms_norm", reads=(Region("y", 0, HIDDEN),), writes=(Region("z", 0, HIDDEN),), flops=4 * HIDDEN)]
# A head needs only its own part of the norm's output; keys and values of the past depend on nothing, like weights.
attention = [TaskTile("attention", reads=(Region("z", i * HEAD, (i + 1) * HEAD),), writes=(Region("out", i * HEAD, (i + 1) * HEAD),),
                      weight_bytes=2 * CONTEXT * HEAD * 2, flops=4 * CONTEXT * HEAD) for i in range(HEADS)]

engine = MPKMegaKernelEngine(num_sms=132)
graph = engine.graph([*gemm, *norm, *attention])
print(f"{len(graph.tasks)} tasks, {len(graph.events)} events; ready at once: {len(graph.ready_tasks([]))}")

mega = engine.benchmark_mpk_persistent(graph)
for name, result in (("kernel per operator, eager", engine.benchmark_kernel_per_op_baseline(graph, launch="eager")),
                     ("kernel per operator, CUDA graph", engine.benchmark_kernel_per_op_baseline(graph)), ("persistent", mega)):
    print(f"{name:32} {result.latency_us:6.2f} us, {result.memory_bytes / 1e6:.2f} MB from memory, {result.activation_bytes / 1e3:.1f} KB of it activations")
print(f"speed-up {mega.speed_up:.2f}")

busiest = max(engine.workers(graph), key=lambda w: w.busy_us)
print(f"SM {busiest.id} ran tasks {list(busiest.queue)}: busy {busiest.busy_us:.2f} us, idle {({k: round(v, 2) for k, v in busiest.idle_us.items()})}")
