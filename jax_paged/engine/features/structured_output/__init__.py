"""Structured output: JSON schemas, regular expressions, choices, grammars and structural tags.

Grammars compiles a constraint with llguidance, after a trial compilation in a subprocess (compile_sandbox).
Each output then has a Matcher, which follows the output's tokens and computes the mask of its next token.
EngineCore calls `with_token_masks` before it dispatches a step, and `forced_tokens` after the step has
returned, to draft tokens that the grammar leaves no choice about.
"""
