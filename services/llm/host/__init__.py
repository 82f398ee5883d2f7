"""The processes that hold llama.cpp: one for the engine, one for text. Started by exec, ended by the end of their pipe."""
