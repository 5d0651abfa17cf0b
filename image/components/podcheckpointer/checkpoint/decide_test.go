package checkpoint

import (
	"reflect"
	"testing"
	"time"
)

const (
	self = "kube-system/pod-checkpointer-1"
	app  = "kube-system/kube-apiserver-1"
)

// step is a look, after some seconds, and what must follow.
type step struct {
	after       int // seconds since the step before
	parents     map[string]bool
	running     map[string]bool
	checkpoints map[string]Checkpoint
	want        Actions
}

func ids(all ...string) map[string]bool {
	m := map[string]bool{}
	for _, id := range all {
		m[id] = true
	}
	return m
}

func one(id string, c Checkpoint) map[string]Checkpoint { return map[string]Checkpoint{id: c} }

var (
	inactive, active = one(app, Checkpoint{}), one(app, Checkpoint{Active: true})
	both             = map[string]Checkpoint{app: {}, self: {Own: true, Active: true}}
)

// decisions are sequences of looks.
var decisions = map[string][]step{
	"its own checkpoint is active at once": {
		{parents: ids(self), running: ids(self), checkpoints: one(self, Checkpoint{Own: true}), want: Actions{Activate: []string{self}}},
		{after: 3, checkpoints: one(self, Checkpoint{Own: true, Active: true}), want: Actions{Activate: []string{self}}},
	},
	"two looks without a sandbox activate": {
		{running: ids(app), checkpoints: inactive},
		{after: 3, running: ids(), checkpoints: inactive},
		{after: 3, running: ids(), checkpoints: inactive, want: Actions{Activate: []string{app}}},
		{after: 3, running: ids(), checkpoints: active, want: Actions{Activate: []string{app}}},
	},
	"a sandbox in between counts": {
		{running: ids(), checkpoints: inactive},
		{after: 3, running: ids(app), checkpoints: inactive},
		{after: 3, running: ids(), checkpoints: inactive},
	},
	"the parent's sandbox deactivates, and then there is a pause": {
		{running: map[string]bool{app: false}, checkpoints: active}, // its container isn't made yet
		{running: ids(app), checkpoints: active, want: Actions{Deactivate: []string{app}}},
		{after: 3, running: ids(), checkpoints: inactive},
		{after: 3, running: ids(), checkpoints: inactive},
		{after: 53, running: ids(), checkpoints: inactive},
		{after: 1, running: ids(), checkpoints: inactive, want: Actions{Activate: []string{app}}},
	},
	"no answer of the runtime decides nothing": {
		{running: ids(), checkpoints: inactive},
		{after: 3, checkpoints: inactive},
		{after: 3, checkpoints: inactive},
		{after: 3, checkpoints: active},
	},
	"a deleted parent isn't replaced, and its checkpoint is removed later": {
		{parents: ids(), running: ids(), checkpoints: inactive},
		{after: 3, parents: ids(), running: ids(), checkpoints: inactive},
		{after: 296, parents: ids(), running: ids(), checkpoints: inactive},
		{after: 1, parents: ids(), running: ids(), checkpoints: inactive, want: Actions{Remove: []string{app}}},
	},
	"an active checkpoint of a deleted parent stays active until then": {
		{parents: ids(), running: ids(), checkpoints: active, want: Actions{Activate: []string{app}}},
		{after: 299, parents: ids(), running: ids(), checkpoints: active, want: Actions{Activate: []string{app}}},
		{after: 1, parents: ids(), running: ids(), checkpoints: active, want: Actions{Remove: []string{app}}},
	},
	"a parent that is back isn't missing": {
		{parents: ids(), running: ids(app), checkpoints: inactive},
		{after: 299, parents: ids(app), running: ids(app), checkpoints: inactive},
		{after: 10, parents: ids(), running: ids(app), checkpoints: inactive},
	},
	"nothing is removed without an API server": {
		{parents: ids(), running: ids(app), checkpoints: inactive},
		{after: 600, running: ids(app), checkpoints: inactive},
		{after: 3, parents: ids(), running: ids(app), checkpoints: inactive, want: Actions{Remove: []string{app}}},
	},
	"without the pod-checkpointer all are removed, its own last": {
		{parents: ids(app), running: ids(app), checkpoints: both, want: Actions{Activate: []string{self}}},
		{after: 300, parents: ids(app), running: ids(app), checkpoints: both, want: Actions{Remove: []string{app, self}, End: true}},
	},
	"its own checkpoints are removed together": {
		{parents: ids("n/new"), checkpoints: map[string]Checkpoint{"n/new": {Own: true}, self: {Own: true}}, want: Actions{Activate: []string{self, "n/new"}}},
		{after: 10, parents: ids(), checkpoints: map[string]Checkpoint{"n/new": {Own: true}, self: {Own: true}}, want: Actions{Activate: []string{self, "n/new"}}},
		{after: 290, parents: ids(), checkpoints: map[string]Checkpoint{"n/new": {Own: true}, self: {Own: true}}, want: Actions{Activate: []string{self, "n/new"}}},
		{after: 10, parents: ids(), checkpoints: map[string]Checkpoint{"n/new": {Own: true}, self: {Own: true}}, want: Actions{Remove: []string{self, "n/new"}, End: true}},
	},
	"its own checkpoint is removed last, whatever its name is": {
		{parents: ids("z"), running: ids("z"), checkpoints: map[string]Checkpoint{"z": {}, self: {Own: true}}, want: Actions{Activate: []string{self}}},
		{after: 300, parents: ids("z"), running: ids("z"), checkpoints: map[string]Checkpoint{"z": {}, self: {Own: true}}, want: Actions{Remove: []string{"z", self}, End: true}},
	},
	"only the older of its own pods is gone": {
		{parents: ids("n/new", app), running: ids(app), checkpoints: map[string]Checkpoint{app: {}, "n/new": {Own: true}, self: {Own: true}},
			want: Actions{Activate: []string{self, "n/new"}}},
		{after: 300, parents: ids("n/new", app), running: ids(app), checkpoints: map[string]Checkpoint{app: {}, "n/new": {Own: true}, self: {Own: true}},
			want: Actions{Activate: []string{"n/new"}, Remove: []string{self}}},
	},
}

func TestDecide(t *testing.T) {
	t.Parallel()
	for name, steps := range decisions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, now := Decider{Grace: 5 * time.Minute}, time.Unix(0, 0)
			for i, s := range steps {
				now = now.Add(time.Duration(s.after) * time.Second)
				if got := d.Decide(Look{Now: now, Parents: s.parents, Running: s.running, Checkpoints: s.checkpoints}); !reflect.DeepEqual(got, s.want) {
					t.Errorf("step %d: %+v, want %+v", i+1, got, s.want)
				}
			}
		})
	}
}
