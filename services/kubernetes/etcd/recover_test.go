package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
)

// A restore has a time limit: nothing else decides about this member meanwhile.
// It is tried again, from the uploaded file.
func TestRestoreThatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
		must(t, os.MkdirAll(n.recoveryDir(), 0o700))
		must(t, os.WriteFile(n.recoveryPath(snapshotName), nil, 0o600))
		n.utility = func(ctx context.Context, _ []string) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}
		began := time.Now()
		waits(t, n.restore(t.Context(), RecoverArguments{}, "t"), "the snapshot to be restored")
		if took := time.Since(began); took != restoreTimeout {
			t.Errorf("it took %s", took)
		}
		if _, err := os.Stat(n.recoveryPath(snapshotName)); err != nil {
			t.Error(err)
		}
		if got, err := n.read(); err != nil || got.Phase != none {
			t.Errorf("the record says %q, %v", got.Phase, err)
		}
	})
}

// A node that restarts during an operation begins nothing before the operation
// is known, and nothing while a snapshot is restored or its member is removed.
func TestServiceWaitsForOperations(t *testing.T) {
	t.Parallel()
	n := newRig(t).node("a", config.Init, netip.MustParseAddr("127.0.0.1"))
	running, unread := "", errors.New("the journals aren't read")
	n.o.LeaveWith = []string{"reset"}
	n.o.Running = func(names ...string) (string, error) {
		for _, name := range names {
			if name == running {
				return name + "-x", unread
			}
		}
		return "", unread
	}
	says := func(want string) {
		t.Helper()
		err := n.decide(t.Context())
		waits(t, err)
		if err.Error() != want {
			t.Errorf("waits for %q, not %q", err, want)
		}
	}
	says("the snapshot to be restored: the journals aren't read")
	unread = nil

	running = RecoverOperation
	must(t, os.MkdirAll(n.recoveryDir(), 0o700))
	says("the snapshot to be restored: gbctl operation attach recover-x")
	if _, err := os.Stat(n.recoveryDir()); err != nil {
		t.Errorf("the snapshot is removed under its operation: %v", err)
	}
	must(t, n.write(record{Phase: fresh, Token: "t"}))
	must(t, n.decide(t.Context())) // it is restored

	for _, running = range []string{LeaveOperation, "reset"} {
		must(t, n.write(record{Phase: member, Token: "t"}))
		says("this node to have left etcd: gbctl operation attach " + running + "-x")
	}
	running = ""
	must(t, n.write(record{Phase: fresh, Token: "t"}))
	must(t, n.decide(t.Context()))
	if _, err := os.Stat(n.recoveryDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a recovery has left stays: %v", err)
	}
}

// Only a beginning by the operation itself that etcd doesn't know yet is undone.
func TestWithdraw(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before   record
		data     bool
		going    bool
		restored string
		stays    bool
	}{
		"a bootstrap":                           {before: record{Phase: fresh, Token: "t"}},
		"a bootstrap, and etcd runs":            {before: record{Phase: fresh, Token: "t"}, going: true, stays: true},
		"a bootstrap, and etcd has data":        {before: record{Phase: fresh, Token: "t"}, data: true, stays: true},
		"a bootstrap that was refused":          {before: record{Phase: member, Token: "u"}, data: true, stays: true},
		"a restore":                             {before: record{Phase: fresh, Token: "t"}, data: true, restored: "t"},
		"a restore before its record":           {data: true, restored: "t"},
		"a restore, and etcd runs":              {before: record{Phase: fresh, Token: "t"}, data: true, going: true, restored: "t", stays: true},
		"a restore, and the cluster is another": {before: record{Phase: fresh, Token: "u"}, data: true, restored: "t", stays: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newRig(t).node("a", config.ControlPlane, netip.MustParseAddr("127.0.0.1"))
			must(t, n.write(tt.before))
			if tt.data {
				must(t, os.MkdirAll(n.path("data", "member"), 0o700))
			}
			n.going.Store(tt.going)
			said := ""
			must(t, n.withdraw(t.Context(), func(format string, args ...any) { said = fmt.Sprintf(format, args...) }, tt.restored))
			after, err := n.read()
			must(t, err)
			data, err := n.hasData()
			must(t, err)
			if tt.stays && (!reflect.DeepEqual(after, tt.before) || data != tt.data || said == "") {
				t.Errorf("it is %+v with data %t, and says %q", after, data, said)
			}
			if !tt.stays && (after.Phase != waiting || data) {
				t.Errorf("it is %+v with data %t", after, data)
			}
		})
	}
}
