package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// recordIssuer does in memory what the function of this name does in etcd.
func (f *fixture) recordIssuer(_ context.Context, _ resource.Reader, _, issuer string) ([]string, error) {
	if issuer == "https://lost.example.org:6443" {
		return nil, errors.New("no quorum")
	}
	if !slices.Contains(f.issuers, issuer) {
		f.issuers = append([]string{issuer}, f.issuers...)
	}
	return f.issuers, nil
}

// A new endpoint signs, and the tokens of the former ones stay valid; also while etcd can't be asked. The user's own
// list wins.
func TestFormerIssuersStayValid(t *testing.T) {
	f := start(t, testConfig(t))
	f.etcd(true)
	first := f.config.Cluster.ControlPlane.Endpoint.String()
	move := func(endpoint string, want ...string) {
		t.Helper()
		f.configure(func(c *config.Config) {
			put(t, c.Cluster.ControlPlane.Endpoint.UnmarshalText([]byte(endpoint)))
		})
		eventually.That(t, patience, fmt.Sprintf("the API server accepts %v", want), func() error {
			text, err := os.ReadFile(f.file(apiServer))
			for _, flag := range []string{"--service-account-issuer=", "--api-audiences="} {
				var got []string
				for _, l := range strings.Split(string(text), "\n") {
					if _, value, found := strings.Cut(l, flag); found {
						got = append(got, value)
					}
				}
				if err == nil && !slices.Equal(got, want) {
					err = fmt.Errorf("%s%v", flag, got)
				}
			}
			return err
		})
	}
	const second, third, lost = "https://api.example.org:6443", "https://10.5.0.9:6443", "https://lost.example.org:6443"
	move(first, first)
	move(second, second, first)
	move(third, third, second, first)
	move(lost, lost, third, second, first)
	move(first, first, third, second)
	f.configure(func(c *config.Config) {
		c.Cluster.APIServer.ExtraArgs = config.Args{"service-account-issuer": {second}, "api-audiences": {second}}
	})
	move(third, second)
}
