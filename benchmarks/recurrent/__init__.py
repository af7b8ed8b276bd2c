"""The parts of `benchmarks.lstm`: an LSTM on cuDNN, one made of matrix products, and NumPy's.

A layer has the weights `w` (4 h, inputs), `r` (4 h, h) and the bias `b` (4 h,), each with the rows
of the gates i, f, g, o one after another. With s the logistic function, a step is

    i, f, o = s(w x + r h' + b)     g = tanh(w x + r h' + b)
    c = f c' + i g                  h = o tanh(c)

Source: Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000, as in cuDNN.
"""
