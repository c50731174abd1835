"""Answers, problems, bodies, header fields and connection bounds."""
