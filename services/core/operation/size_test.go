package operation

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// The record of an operation on as many nodes as a step may have parts for fits into etcd,
// also where all its texts are as long as they may be: two steps with a part for each node
// and the list of the nodes, as upgrade-k8s has.
func TestRecordOfTheLargestClusterFits(t *testing.T) {
	now, text := time.Now(), strings.Repeat("x", maxText)
	parts := make([]PartStatus, maxParts)
	for i := range parts {
		name := fmt.Sprintf("%s%d", strings.Repeat("n", maxPartID-3), i+100)[:maxPartID]
		parts[i] = PartStatus{ID: name, What: "upgrading node " + name, State: Skipped, Reason: text, Text: text, Began: now, Ended: now}
	}
	value, err := json.Marshal(strings.Repeat("v", maxValue-2))
	if err != nil {
		t.Fatal(err)
	}
	r := &record{Data: map[string]json.RawMessage{"nodes": value}}
	for i := range 12 {
		r.Steps = append(r.Steps, Status{ID: fmt.Sprint("step-", i), What: text, Reason: text})
	}
	r.Steps[1].Parts, r.Steps[10].Parts = parts, parts
	for range sharedEvents {
		r.Events = append(r.Events, Event{Time: now, Kind: Changed, Step: "step-10", Part: parts[0].ID, State: Running, Text: text})
	}
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes of at most %d", len(data), maxShared)
	if len(data) > maxShared {
		t.Errorf("the record has %d bytes, of at most %d", len(data), maxShared)
	}
}
