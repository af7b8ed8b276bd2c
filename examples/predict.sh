#!/bin/sh
# A picture, and two in a form: each answer is a line of JSON.
service=${1:-http://127.0.0.1:8000}
pictures=$(dirname "$0")/../docs/images

curl --fail --silent --show-error --header 'Content-Type: image/png' \
  --data-binary "@$pictures/seven.png" "$service/predict"
echo
curl --fail --silent --show-error --form "image=@$pictures/seven.png" \
  --form "image=@$pictures/three.png" "$service/predict"
echo
