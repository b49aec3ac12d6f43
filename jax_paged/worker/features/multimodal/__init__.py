"""Images on the device: the image encoder, and rotary positions of image tokens.

ImageEncoder encodes the images that a step needs and caches the resulting vectors, which then replace the
embeddings of placeholder tokens (see prompt_embeds.py). `mrope_positions` and `fill_mrope` compute M-RoPE
positions. The host side, which cuts images into tiles or patches, is jax_paged/engine/features/multimodal.
"""
