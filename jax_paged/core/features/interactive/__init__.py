"""Changes that a user makes while requests run.

request_edits.py edits a request between two steps: `RequestEditor` applies a `Fork`, `Rollback` or
`DropBlocks`. step_edits.py removes or reorders sequences of a step that has been scheduled and not executed
yet. The engine calls both through Scheduler.edit_request and Scheduler.edit.
"""
