"""Data types of the HTTP API: request bodies, responses, errors and the OpenAPI document.

`requests` has the pydantic models of request bodies, which convert to `SamplingParams`; `nested_objects`,
`messages` and `response_format` handle the objects in them. `responses` makes choices, usage and errors
(`ApiError`), with log-probabilities from `logprobs`. `schemas` and `openapi` describe the responses in the
OpenAPI document, and `fields` reports unknown fields. The routes import from here; nothing here runs a
request.
"""
