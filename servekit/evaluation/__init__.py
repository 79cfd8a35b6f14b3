"""The quality gate `servekit eval`: perplexity, questions, and two servers compared. It uses their HTTP API only.

May import servekit.errors and servekit.client. From the bottom up: statistics, questions and perplexity; measurement
and judge, which hold the results of one server and the verdicts on two; comparison; report. These open no sockets.
model_client and evaluation send the requests.
"""
