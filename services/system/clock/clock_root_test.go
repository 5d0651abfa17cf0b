package clock

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

// A real server, chrony, sets a clock that isn't the machine's and is an hour
// behind.
func TestRealTimeServer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: runs a time server in a network namespace")
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	conf := filepath.Join(dir, "chrony.conf")
	text := fmt.Sprintf("local stratum 8\nallow\ncmdport 0\nbindcmdaddress /\npidfile %s/pid\n", dir)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// -x: it never sets or adjusts the machine's clock.
	server := exec.Command("/usr/sbin/chronyd", "-x", "-d", "-u", "root", "-f", conf)
	var out bytes.Buffer
	server.Stderr = &out
	if err := server.Start(); err != nil {
		t.Fatalf("start chronyd (package chrony): %v", err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
		if t.Failed() {
			t.Logf("chronyd: %s", out.String())
		}
	})

	c := &fakeClock{off: -time.Hour}
	n := startNode(t, overNetwork(c), config.Time{Servers: []string{"127.0.0.1"}})
	eventually.That(t, 15*time.Second, "the clock is synchronised", func() error {
		if s, err := Statuses.Get(n.store, StatusID); err != nil || !s.Spec.Synced {
			return fmt.Errorf("%+v, %v\n%s", s.Spec, err, n.log)
		}
		return nil
	})
	if off := c.error().Abs(); off > 50*time.Millisecond || c.jumps() != 1 {
		t.Errorf("the clock is off by %s and was set %d times", off, c.jumps())
	}
	if s := n.status(); s.Stratum != 8 || s.Server != "127.0.0.1:123" || !n.up() {
		t.Errorf("status is %+v", s)
	}
}
