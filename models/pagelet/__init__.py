"""pagelet, the built-in demo model: a small Llama that answers questions about paged attention and sums.

This folder is also its checkpoint folder: `LLM("pagelet")` loads the weights and the tokenizer in it. `train`
creates them from the standard library's docstrings (`corpus`) and from generated conversations (`dialogue`),
and `evaluate` measures how many answers are correct. The other packages do not import these modules.
"""
