#!/bin/sh
# A tree of processes that ignore SIGTERM: tree.sh WIDTH DEPTH [hidden]. Each prints its pid;
# hidden ones have sessions of their own.
trap '' TERM
echo $$
if [ "$2" -gt 0 ]; then
  i=0
  while [ $i -lt "$1" ]; do
    if [ "${3:-}" = hidden ]; then setsid sh "$0" "$1" $(($2 - 1)) hidden & else sh "$0" "$1" $(($2 - 1)) & fi
    i=$((i + 1))
  done
  while :; do wait; sleep 600; done
fi
exec sleep 600
