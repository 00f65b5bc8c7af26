"""What a model finds again in its context: needles in haystacks (`needle`, with `ruler`, its lists of common words, and
`lessons`, training text), and recall probes (`recall`). `linnet.evaluate.needle_scores` has the metrics of needles.
"""
