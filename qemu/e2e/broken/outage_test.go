//go:build e2e && long

package broken

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// outage is long enough for the API server's client of etcd to make pauses of one to two minutes.
	outage = 3 * time.Minute
	// back is the promise: how soon after the end of the outage an API server serves.
	back = 15 * time.Second
)

// An API server serves soon after an outage of etcd. By itself it would try etcd again only after its present pause.
func TestOutageOfEtcd(t *testing.T) {
	c, m := e2etest.Ready(t, "outage", qemu.Container)
	well(c)
	c.Gbctl("service", "etcd", "stop", "--force")
	stopped := time.Now()
	c.Eventually(2*outage, "etcd doesn't serve for "+outage.String(), func() error {
		if lasts := time.Since(stopped); lasts < outage {
			return fmt.Errorf("that was %s ago", lasts)
		}
		return nil
	})
	if out, err := c.Try("get", "--raw", "/readyz", "--request-timeout=3s"); err == nil {
		t.Errorf("the API server is ready without etcd: %s", out)
	}
	c.Gbctl("service", "etcd", "start")
	c.Eventually(mendBudget, "etcd serves", func() error {
		out, err := c.TryGbctl("get", "etcdstatus", "-o", "yaml")
		if err == nil && !strings.Contains(out, "ready: true") {
			err = errors.New(out)
		}
		return err
	})
	serves := time.Now()
	m.Reached("etcd serves again")
	c.Eventually(outage, "the API server is ready", func() error {
		_, err := c.Try("get", "--raw", "/readyz", "--request-timeout=3s")
		return err
	})
	m.Reached("the API server is ready")
	t.Log(c.Gbctl("logs", "controller-runtime", "--tail", "20"))
	if err := c.Promised(serves, time.Now(), back); err != nil {
		t.Error(err)
	}
	well(c)
}
