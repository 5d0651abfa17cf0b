package controlplane

import (
	"bytes"
	"encoding/base64"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/network"
)

const testToken = "q9pyzr.0123456789abcdef"

// testConfig is a control plane's configuration as Load returns it.
func testConfig(t *testing.T) *config.Config {
	t.Helper()
	endpoint, err := config.ParseURL("https://10.5.0.2:6443")
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	c := &config.Config{Version: config.Version}
	c.Machine.Type = config.Init
	c.Machine.CA = authority(t, pki.NewMachineCA)
	c.Cluster = config.Cluster{
		Name:         "test",
		Secret:       config.Secret(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))),
		Token:        testToken,
		ControlPlane: config.ControlPlaneSet{Endpoint: endpoint, LocalAPIServerPort: 6443},
		Network: config.ClusterNetwork{
			CNI:            config.CNI{Name: config.CNIFlannel, Flannel: config.Flannel{Image: config.DefaultFlannelImage}},
			DNSDomain:      "cluster.local",
			PodSubnets:     []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
			ServiceSubnets: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		},
		CA:                authority(t, pki.NewKubernetesCA),
		AggregatorCA:      authority(t, pki.NewAggregatorCA),
		ServiceAccount:    config.ServiceAccount{Key: key},
		Etcd:              config.Etcd{Image: config.DefaultEtcdImage, CA: authority(t, pki.NewEtcdCA)},
		APIServer:         config.APIServer{Image: config.DefaultAPIServerImage},
		ControllerManager: config.ControllerManager{Image: config.DefaultControllerManagerImage},
		Scheduler:         config.Scheduler{Image: config.DefaultSchedulerImage},
		Proxy:             config.Proxy{Image: config.DefaultProxyImage, Mode: config.ProxyNFTables},
		CoreDNS:           config.CoreDNS{Image: config.DefaultCoreDNSImage},
	}
	return c
}

func authority(t *testing.T, make func(time.Time) (pki.CA, error)) config.CertKey {
	t.Helper()
	ca, err := make(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return config.CertKey{Crt: ca.Cert, Key: ca.Key}
}

// testAddress is never connected to (RFC 5737).
var testAddress = netip.MustParseAddr("192.0.2.10")

// testStore is the store of a node that knows its configuration and its network.
func testStore(t *testing.T, c *config.Config) *resource.Store {
	t.Helper()
	store := resource.NewStore()
	put(t, configuration.Configs.Put(store.As("test"), configuration.ConfigID, c))
	put(t, network.Hostnames.Put(store.As("test"), network.HostnameID, "n1"))
	put(t, network.Addresses.Put(store.As("test"), network.AddressID, network.NodeAddress{
		Primary: testAddress, All: []netip.Prefix{netip.PrefixFrom(testAddress, 24)},
	}))
	return store
}

func put(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testLog writes the controllers' log to the test's own log.
func testLog(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, nil))
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(line []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(line)))
	return len(line), nil
}
