//go:build e2e && long

// Package clock tests machines whose hardware clock is a year wrong. With a time
// server their clocks are right before a certificate is checked. Without one they
// start as well, report the wrong clock, and set it when there is a time server: they are new
// machines, which believe one. Later, they don't believe one that says a far time.
// Containers have the clock of this machine, so this test uses QEMU only.
package clock

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/tools/testing/timeserver"
	"gopkg.in/yaml.v3"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	year = 365 * 24 * time.Hour
	// timeServer is the first address of the nodes' network, which is this machine's.
	timeServer = "10.5.0.1"
	// sayBudget is for a node to boot, and to give up the wait for a time server.
	sayBudget = 15 * time.Second
	// syncBudget is longer than the pause between two queries to a server that didn't answer.
	syncBudget = 30 * time.Second
	// etcdBudget is for the image of etcd to be pulled, and for it to start.
	etcdBudget = 30 * time.Second
	// liarBudget is for the next question to the time server, once a minute.
	liarBudget = 2 * time.Minute
	// near is how old the last answer of the time server may be: it is asked once a minute.
	near = 2 * time.Minute
)

// wrong makes a cluster of one machine with such a clock, which has a time server configured.
func wrong(t *testing.T, name string, offset time.Duration) (*e2etest.Cluster, *e2etest.Mark) {
	t.Helper()
	return e2etest.Start(t, name, qemu.QEMU, func(o *qemu.Options) {
		o.ClockOffset = offset
		o.Patches = [][]byte{[]byte(`{"machine":{"time":{"disabled":false,"servers":["` + timeServer + `"]}}}`)}
	})
}

// serve runs chrony in the nodes' network. It serves this machine's time, and
// never changes it. stop ends it.
func serve(t *testing.T, inside *osthread.Thread) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	conf := filepath.Join(dir, "chrony.conf")
	text := fmt.Sprintf("local stratum 8\nallow\nbindaddress %s\ncmdport 0\nbindcmdaddress /\npidfile %s/pid\n", timeServer, dir)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/usr/sbin/chronyd", "-x", "-d", "-u", "root", "-f", conf)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := inside.Do(cmd.Start); err != nil {
		t.Fatalf("start chronyd (package chrony): %v", err)
	}
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// status is a node's time in gbctl's output.
type status struct {
	Spec struct {
		Synced   bool      `yaml:"synced"`
		Server   string    `yaml:"server"`
		Message  string    `yaml:"message"`
		LastSync time.Time `yaml:"lastSync"` // by the node's clock
	} `yaml:"spec"`
}

func ask(c *e2etest.Cluster) (s status, err error) {
	out, err := c.TryGbctl("get", "timestatus", "-o", "yaml")
	if err != nil {
		return s, err
	}
	return s, yaml.Unmarshal([]byte(out), &s)
}

// right is nil if the node has the time server's time, which is this machine's.
func right(c *e2etest.Cluster) error {
	s, err := ask(c)
	if err != nil {
		return err
	}
	if !s.Spec.Synced || !strings.Contains(s.Spec.Server, timeServer) || time.Since(s.Spec.LastSync).Abs() > c.Scale(near) {
		return fmt.Errorf("its time is %+v, and this machine's %s", s.Spec, time.Now())
	}
	return nil
}

// votes: etcd requires certificates of all clients, and shows its own.
func votes(c *e2etest.Cluster) error {
	out, err := c.TryGbctl("etcd", "status")
	if err == nil && !strings.Contains(out, "leader") {
		err = fmt.Errorf("etcd status:\n%s", out)
	}
	return err
}

func TestAYearAhead(t *testing.T) {
	c, m := wrong(t, "ahead", year)
	inside := c.Network()
	stop := serve(t, inside)
	t.Log(c.Says(sayBudget, 0, "timed: Running (up): synchronised with "+timeServer, "the clock was off by -8").Text)
	c.Eventually(syncBudget, "the time is the time server's", func() error { return right(c) })
	c.Eventually(etcdBudget, "etcd votes", func() error { return votes(c) })
	m.Reached("etcd votes")

	// The same server takes to lying: it doesn't make the certificates expire.
	before := len(c.Text())
	stop()
	if err := inside.Do(func() error { _, err := timeserver.Serve(t, timeServer+":123", year); return err }); err != nil {
		t.Fatal(err)
	}
	t.Log(c.Says(liarBudget, before, "timed: no time: by "+timeServer, "one server alone doesn't move the clock so far").Text)
	if err := votes(c); err != nil {
		t.Errorf("after the lie: %v", err)
	}
	m.Reached("a liar isn't believed")
	// The operator sets the clock, which is right already.
	c.Gbctl("time", "set")
	c.Says(sayBudget, before, "timed: clock set from", "by the operator")
	if err := votes(c); err != nil {
		t.Errorf("after the order: %v", err)
	}
}

func TestAYearBehind(t *testing.T) {
	c, m := wrong(t, "behind", -year)
	inside := c.Network()
	t.Log(c.Says(sayBudget, 0, "timed: the clock was at", "and is put to").Text)
	t.Log(c.Says(sayBudget, 0, "timed: time isn't synchronised after", "machine.time.servers").Text)
	c.Eventually(etcdBudget, "etcd votes", func() error { return votes(c) })
	m.Reached("etcd votes")
	s, err := ask(c)
	if err != nil || s.Spec.Synced || s.Spec.Message == "" {
		t.Errorf("without a time server its time is %+v, %v", s.Spec, err)
	}
	if out, err := c.TryGbctl("doctor"); !strings.Contains(out, "(clock-not-synced") {
		t.Errorf("the doctor doesn't tell of the clock: %v: %s", err, out)
	}
	m.Reached("it says so")
	serve(t, inside)
	c.Eventually(syncBudget, "the time is the time server's", func() error { return right(c) })
	m.Reached("a time server put it right")
	c.Eventually(etcdBudget, "etcd votes", func() error { return votes(c) })
}
