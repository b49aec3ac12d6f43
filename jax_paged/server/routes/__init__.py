"""Route handlers of the HTTP API, grouped in classes.

`generation` handles completions and chats, `responses` OpenAI's Responses API, and `pooling` embeddings,
classification and scoring. `models` manages the names of the model and its LoRA adapters, `information` has
/tokenize, /version and similar routes, and `developer` has routes for the operator. `status_page` and
`docs_page` serve HTML. `app.OpenAIServer` creates the classes and registers their methods as FastAPI routes;
the docstrings of these methods are the descriptions in the OpenAPI document.
"""
