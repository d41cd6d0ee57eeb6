"""Any callable over any inputs, data parallel: one model per rank, every item once, answers in input order."""
