//go:build e2e

package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// quota of the member's database, which is full after some of these values.
const (
	quota     = 4 << 20
	fillValue = 256 << 10
)

// A full database raises an alarm, which is reported. It ends after there is
// room again, and not before.
func TestRealAlarm(t *testing.T) {
	t.Parallel()
	_, node := realRig(t)
	a := node("a", config.Init)
	a.cfg.Cluster.Etcd.ExtraArgs["quota-backend-bytes"] = config.Values{fmt.Sprint(quota)}
	ctx := t.Context()
	a.start()
	a.serves()
	c, err := Dial(ctx, a.o.Store, clientURL(a.addr))
	must(t, err)
	defer c.Close()
	if found, err := a.Alarms(ctx, false); err != nil || len(found) > 0 {
		t.Fatalf("alarms of an empty database: %v, %v", found, err)
	}
	fill := func() {
		t.Helper()
		eventually.That(t, 30*time.Second, "the database to be full", func() error {
			_, err := c.Put(ctx, "fill", string(bytes.Repeat([]byte{'x'}, fillValue)))
			if errors.Is(err, rpctypes.ErrNoSpace) {
				return nil
			}
			return fmt.Errorf("it takes one more: %w", err)
		})
	}
	raised := func(found []*pb.AlarmMember, err error) {
		t.Helper()
		own, ok, idErr := a.identity()
		if err != nil || len(found) != 1 || found[0].Alarm != pb.AlarmType_NOSPACE || found[0].MemberID != own.member || !ok || idErr != nil {
			t.Fatalf("alarms: %v, %v, want NOSPACE of %x", found, err, own.member)
		}
	}
	fill()
	raised(a.Alarms(ctx, false))
	all, err := a.Status(ctx)
	must(t, err)
	if said := strings.Join(all[0].Errors, "; "); !strings.Contains(said, "NOSPACE") {
		t.Errorf("status has the problems %q", said)
	}

	// The negative twin: an alarm that is only disarmed comes back with the next write.
	if found, err := a.Alarms(ctx, true); err != nil || len(found) > 0 {
		t.Errorf("alarms just after they were disarmed: %v, %v", found, err)
	}
	fill()
	raised(a.Alarms(ctx, false))

	compact(ctx, t, c)
	before, after, err := a.Defragment(ctx)
	if err != nil || before < quota/2 || after > before/4 {
		t.Errorf("defragment: %d, then %d, %v", before, after, err)
	}
	raised(a.Alarms(ctx, false))
	if found, err := a.Alarms(ctx, true); err != nil || len(found) > 0 {
		t.Errorf("alarms after they were disarmed: %v, %v", found, err)
	}
	if _, err := c.Put(ctx, "fill", "again"); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if all, err := a.Status(ctx); err != nil || len(all[0].Errors) > 0 {
		t.Errorf("status: %v, %v", all[0].Errors, err)
	}
}

// compact drops all values except the last one.
func compact(ctx context.Context, t *testing.T, c *clientv3.Client) {
	t.Helper()
	last, err := c.Get(ctx, "fill")
	must(t, err)
	_, err = c.Compact(ctx, last.Header.Revision, clientv3.WithCompactPhysical())
	must(t, err)
}
