"""Images in prompts and chat messages, on the host.

`extract_images` takes the images out of chat messages. ImageReader cuts the images of a prompt into the tiles
or patches that the model's encoder reads, and inserts their placeholder tokens. image_fetch downloads images
from allowed hosts. The device side is jax_paged/worker/features/multimodal, which encodes the images.
"""
