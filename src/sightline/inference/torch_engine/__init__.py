"""The embedded engine: continuous batching on plain torch, CPU or CUDA.

build             constructs the engine: device, model, memory, first weights
engine            the loop on its thread: take, swap weights, admit, step
scheduler         who has a row, who waits for pixels, who runs, who is done
model_runner      one step on the device: encode images, forward, sample, score prompts
recurrent_runner  one step for models whose layers carry a state from token to token
observer          counters, request timelines, and where the engine's time goes
step_plan         which tokens of which rows the next forward pass computes
decode            rows that compute one token as passes of fixed shape, replayed as CUDA graphs
row_table         rows, one for a sequence: tokens, positions and sampling settings, as arrays
prefix_cache      finished rows that wait for their next turn, and rows that begin with a prompt
kv_cache          keys and values of the rows in pages that rows may share, and their attention
sampling          logits to tokens and their logprobs
request           one request, from submission to its answer, and what the engine counts
"""
