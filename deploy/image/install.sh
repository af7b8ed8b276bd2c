#!/bin/sh
# In the Dockerfile: install the dependencies of the argument, as '.[cuda12]', but no code.
set -eu
if [ -s /etc/ssl/mirror.pem ]; then export PIP_CERT=/etc/ssl/mirror.pem; fi
touch README.md LICENSE # pyproject.toml names them
/build/bin/pip install 'setuptools>=77'
/build/bin/pip --python /opt/lenet-serve/bin/python install --constraint constraints.txt "$1"
python3 left_out.py remove /opt/lenet-serve/lib/python3*/site-packages
