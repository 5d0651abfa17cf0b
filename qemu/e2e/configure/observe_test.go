//go:build e2e && long

package configure

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// observePatch sends the logs to an address, and serves metrics at a port.
const observePatch = `
machine:
  logging: {destinations: [{endpoint: "tcp://ADDRESS", format: json_lines, extraTags: {rack: r12}}]}
  metrics: {address: ":9200"}
`

// observed: another machine gets the logs of services and the audit log, and the metrics.
func observed(t *testing.T, c *e2etest.Cluster) {
	network := c.Network()
	listener, err := network.Listen("10.5.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	lines := e2etest.Collect(t, listener)
	c.Gbctl("patch", "mc", "--immediate", "-p", strings.Replace(observePatch, "ADDRESS", listener.Addr().String(), 1))
	c.Kubectl("create", "namespace", "observed")
	c.Gbctl("service", "kubelet", "restart") // a kubelet without work says nothing
	for _, want := range []string{
		`"facility":"service","host":"` + c.Node() + `"`, `"service":"kubelet"`, `"rack":"r12"`,
		`"facility":"audit"`, `namespaces/observed`,
	} {
		c.Eventually(upBudget, "a line with "+want, func() error { return lines.Has(want) })
	}
	c.Eventually(apiBudget, "the destination takes lines", func() error {
		out, err := c.TryGbctl("get", "logdestinations")
		if err == nil && !strings.Contains(out, listener.Addr().String()) {
			err = fmt.Errorf("destinations are\n%s", out)
		}
		return err
	})

	authorities, own, err := c.Access().Credentials()
	if err != nil {
		t.Fatal(err)
	}
	trust := &tls.Config{RootCAs: authorities, Certificates: []tls.Certificate{own}}
	url := "https://" + net.JoinHostPort(c.Nodes[0].Address.String(), "9200") + "/metrics"
	dial := func(ctx context.Context, _, address string) (net.Conn, error) { return network.Dial(ctx, address) }
	user := &http.Client{Transport: &http.Transport{TLSClientConfig: trust, DialContext: dial, DisableKeepAlives: true}, Timeout: apiBudget}
	c.Eventually(upBudget, "metrics at their own address", func() error {
		answer, err := user.Get(url)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && (answer.StatusCode != http.StatusOK || !strings.Contains(string(text), "garboard_")) {
			err = fmt.Errorf("%s: %.200s", answer.Status, text)
		}
		return err
	})
	stranger := trust.Clone()
	stranger.Certificates = nil
	nobody := &http.Client{Transport: &http.Transport{TLSClientConfig: stranger, DialContext: dial, DisableKeepAlives: true}, Timeout: apiBudget}
	if answer, err := nobody.Get(url); err == nil {
		answer.Body.Close()
		if answer.StatusCode == http.StatusOK {
			t.Error("a client without a certificate gets the metrics")
		}
	}
	c.Gbctl("apply-config", "--immediate", "-f", c.Configuration(c.Node()))
	up(c)
}
