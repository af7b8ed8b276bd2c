#!/bin/sh
# A picture, and the pixels of one image as they are: each answer is a line of JSON.
service=${1:-http://127.0.0.1:8000}
pictures=$(dirname "$0")/../docs/images

curl --fail --silent --show-error --header 'Content-Type: image/png' \
  --data-binary "@$pictures/seven.png" "$service/predict"
echo
head -c 784 /dev/zero | curl --fail --silent --show-error \
  --header 'Content-Type: application/octet-stream' --data-binary @- "$service/predict"
echo
