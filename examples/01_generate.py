"""Lower, build and run the bundled model: the whole public API in a few lines."""

import mpk

compiler = mpk.Compiler(target_hardware="cpp")
graph = compiler.lower_model("smollm2-135m-instruct")
instance = compiler.build(graph).create_instance(max_batch=2)

tokenizer = graph.model.tokenizer
prompts = [tokenizer.encode(text) for text in ("The capital of France is", "Once upon a time")]
result = instance.generate(prompts, max_new_tokens=16)
for prompt, tokens in zip(prompts, result.tokens, strict=True):
    print(repr(tokenizer.decode(prompt + tokens)))
