"""The embedded engine: continuous batching on plain torch, CPU or CUDA.

engine     the loop on its thread: take, swap weights, admit, step
scheduler  who has a row, who waits for pixels, who runs, who is done
runner     one step on the device: encode images, forward, sample
plan       which tokens of which rows the next forward pass computes
recurrent  the same for models whose layers carry a state from token to token
rows       the table of rows: tokens, positions and sampling settings, as arrays
prefix     finished rows that wait for the next turn of their rollout
kv         keys and values of the rows, and the attention over them
vision     features of images, encoded once per vision version
sampling   logits to tokens and their logprobs
request    one request, from submission to its answer
build      an engine from settings
plain      what the engine is measured against
stats      counts, and when the engine was busy
"""
