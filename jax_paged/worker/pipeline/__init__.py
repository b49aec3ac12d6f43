"""Pipeline parallelism: execution of a model whose layers are divided into stages.

`stages.Pipeline` runs all stages in one process. `stage_runner.StageRunner` runs the stage of a process that
has only one stage, and `stage_links.StageLinks` sends arrays between such processes. ModelRunner uses them in
place of a single compiled program; other code does not depend on stages.
"""
