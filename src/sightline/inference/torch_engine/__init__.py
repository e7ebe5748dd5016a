"""The embedded engine: continuous batching on plain torch, CPU or CUDA.

build             constructs the engine: device, model, memory, first weights
engine            the loop on its thread: schedule, execute, update
scheduler         assigns rows to requests, waits for pixels, finishes requests
model_runner      one step on the device: encode images, forward, sample, score prompts
recurrent_runner  one step for models with recurrent layers
whole_row_runner  one step for models without a KV cache
observer          counters, and where the engine's time goes
step_plan         the tokens of each row that the next forward pass computes
decode            decode steps of fixed shape, replayed as CUDA graphs
row_table         one row per sequence: tokens, positions and sampling settings, as arrays
prefix_cache      finds finished rows to continue, and rows that hold a prompt
kv_cache          keys and values in pages that rows may share, and their attention
sampling          logits to tokens and their logprobs
request           a request inside the engine, and the engine's counters
memory_plan       divides GPU memory between weights, work space and the KV cache
inference_engine  the entry in the registry of engines
"""
