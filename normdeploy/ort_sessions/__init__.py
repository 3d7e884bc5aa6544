"""onnxruntime sessions, and the child process that tries a risky one first."""
