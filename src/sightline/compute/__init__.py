"""What trainer and engines compute alike: models, attention, logprobs, and weights on their way.

model                                    a checkpoint loaded with our attention inside
attention, _cuda, _cudnn, _shapes        which token sees which, and the kernels that compute it
fused_layers, triton_kernels             layers with fewer kernels, and kernels of our own, on a GPU
logprobs                                 logprobs of tokens under the distribution sampled from
feature_cache                            features of items, kept up to a size
tensor_file, checkpoint_files            safetensors written and read tensor by tensor
weights, lora_weights                    published versions: files, manifests, adapters
broadcast, host_copy                     versions sent without files, and their copy on the host
shared_weights, weights_digest           versions in memory that is shared, and what names them
"""
