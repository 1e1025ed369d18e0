"""How rows move: streams and events, row copies, and the engine that orders them.

Nothing in this package imports SGLang or decides what moves.
"""
