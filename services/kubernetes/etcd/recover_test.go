package etcd

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/config"
)

// Restoring has an end: meanwhile nobody else may decide about this member. It is tried
// again, from the file that was sent.
func TestRestoreThatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	synctest.Test(t, func(t *testing.T) {
		n := r.node("a", config.ControlPlane, netip.MustParseAddr("192.0.2.1"))
		must(t, os.MkdirAll(n.recoveryDir(), 0o700))
		must(t, os.WriteFile(n.recoveryPath(snapshotName), nil, 0o600))
		must(t, n.write(record{Phase: recovering, Token: "t"}))
		n.utility = func(ctx context.Context, _ []string) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}
		began := time.Now()
		waits(t, n.decide(t.Context()), "the snapshot to be restored")
		if took := time.Since(began); took != restoreTimeout {
			t.Errorf("it took %s", took)
		}
		if _, err := os.Stat(n.recoveryPath(snapshotName)); err != nil {
			t.Error(err)
		}
		if got, err := n.read(); err != nil || got.Phase != recovering {
			t.Errorf("the journal says %q, %v", got.Phase, err)
		}
	})
}
