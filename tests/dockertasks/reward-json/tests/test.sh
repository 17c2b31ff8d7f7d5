
#!/bin/bash
reward=0
[ "$(cat sum.txt)" = 356 ] && reward=1
echo "{\"reward\": $reward, \"answered\": $([ -e sum.txt ] && echo 1 || echo 0)}" > /logs/verifier/reward.json
