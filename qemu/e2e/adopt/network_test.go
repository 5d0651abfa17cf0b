//go:build e2e && long

package adopt

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/qemu/osthread"
)

// machine makes one more machine on the nodes' bridge: a network namespace with a
// cable and an address.
func machine(t *testing.T, network *osthread.Thread, name string, address netip.Prefix) *osthread.Thread {
	t.Helper()
	thread, err := osthread.NewInNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := thread.Close(); err != nil {
			t.Error(err)
		}
	})
	var there *os.File
	err = thread.Do(func() (err error) {
		there, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	err = network.Do(func() error {
		bridge, err := netlink.LinkByName("nodes")
		if err != nil {
			return err
		}
		cable := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "eth0", PeerNamespace: netlink.NsFd(there.Fd())}
		cable.Name, cable.MasterIndex = name, bridge.Attrs().Index
		return errors.Join(netlink.LinkAdd(cable), netlink.LinkSetUp(cable))
	})
	if err != nil {
		t.Fatalf("cable of %s: %v", name, err)
	}
	err = thread.Do(func() error {
		lo, err1 := netlink.LinkByName("lo")
		eth, err2 := netlink.LinkByName("eth0")
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		ip := &net.IPNet{IP: address.Addr().AsSlice(), Mask: net.CIDRMask(address.Bits(), address.Addr().BitLen())}
		return errors.Join(netlink.AddrAdd(eth, &netlink.Addr{IPNet: ip}), netlink.LinkSetUp(lo), netlink.LinkSetUp(eth))
	})
	if err != nil {
		t.Fatalf("address of %s: %v", name, err)
	}
	return thread
}

// balancer is the load balancer in front of the cluster's API servers: it uses
// each ready one in turn.
type balancer struct {
	network *osthread.Thread
	listen  net.Listener
	turn    atomic.Uint32
	open    sync.WaitGroup

	mu       sync.Mutex // guards backends
	backends []netip.Addr
}

// backendTimeout is the time after which a missing backend is skipped.
const backendTimeout = 2 * time.Second

func balance(t *testing.T, network *osthread.Thread, address netip.Addr) *balancer {
	t.Helper()
	l, err := network.Listen(netip.AddrPortFrom(address, 6443).String())
	if err != nil {
		t.Fatal(err)
	}
	b := &balancer{network: network, listen: l}
	b.open.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			b.open.Go(func() { b.pass(conn) })
		}
	})
	return b
}

// set sets the backends of new connections. Open connections stay.
func (b *balancer) set(backends ...netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.backends = backends
}

func (b *balancer) pass(in net.Conn) {
	defer in.Close()
	out := b.dial()
	if out == nil {
		return
	}
	defer out.Close()
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			in.Close()
			out.Close()
		})
	}
	both.Wait()
}

// dial connects to the next ready backend, nil if none is.
func (b *balancer) dial() net.Conn {
	b.mu.Lock()
	all := b.backends
	b.mu.Unlock()
	first := int(b.turn.Add(1))
	for i := range all {
		address := netip.AddrPortFrom(all[(first+i)%len(all)], 6443).String()
		if b.ready(address) != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), backendTimeout)
		conn, err := b.network.Dial(ctx, address)
		cancel()
		if err == nil {
			return conn
		}
	}
	return nil
}

// ready checks as load balancers do: without a client certificate, and without
// verification of the server's.
func (b *balancer) ready(address string) error {
	client := &http.Client{Timeout: backendTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, to string) (net.Conn, error) { return b.network.Dial(ctx, to) },
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
	}}
	resp, err := client.Get("https://" + address + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// close closes the listener; open connections end with their clients and servers.
func (b *balancer) close() { b.listen.Close() }

// writer is a client that writes all the time: it makes one ConfigMap after the
// other, at the cluster's endpoint, and records how long none could be made.
type writer struct {
	client *http.Client
	url    string
	stop   chan struct{}
	done   sync.WaitGroup

	// Complete once done is.
	acknowledged int
	longest      time.Duration
	last         error
}

const (
	writePeriod  = 200 * time.Millisecond
	writeTimeout = 5 * time.Second
)

// write starts it. kubeconfig is the text of an admin.conf.
func write(t *testing.T, network *osthread.Thread, kubeconfig []byte) *writer {
	t.Helper()
	server, trust := access(t, kubeconfig)
	w := &writer{url: server + "/api/v1/namespaces/writes/configmaps", stop: make(chan struct{})}
	w.client = &http.Client{Timeout: writeTimeout, Transport: &http.Transport{
		// Each write has its own connection, like that of a new client.
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, to string) (net.Conn, error) { return network.Dial(ctx, to) },
		TLSClientConfig:   trust,
	}}
	w.done.Go(func() {
		last := time.Now()
		tick := time.NewTicker(writePeriod)
		defer tick.Stop()
		for {
			select {
			case <-w.stop:
				return
			case <-tick.C:
			}
			if err := w.one(w.acknowledged); err != nil {
				w.last = err
				continue
			}
			w.acknowledged++
			w.longest = max(w.longest, time.Since(last))
			last = time.Now()
		}
	})
	return w
}

func (w *writer) one(n int) error {
	body := fmt.Sprintf(`{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "n%d"}}`, n)
	resp, err := w.client.Post(w.url, "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	// It exists already if only the answer to an earlier attempt was lost.
	if resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusConflict {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	return nil
}

// end returns the number of acknowledged writes, and the longest time without one.
func (w *writer) end() (acknowledged int, longest time.Duration, last error) {
	close(w.stop)
	w.done.Wait()
	return w.acknowledged, w.longest, w.last
}

// access is the server and the credentials of an admin.conf.
func access(t *testing.T, kubeconfig []byte) (server string, trust *tls.Config) {
	t.Helper()
	var conf struct {
		Clusters []struct {
			Cluster struct {
				Server string
				CA     string `yaml:"certificate-authority-data"`
			}
		}
		Users []struct {
			User struct {
				Cert string `yaml:"client-certificate-data"`
				Key  string `yaml:"client-key-data"`
			}
		}
	}
	if err := yaml.Unmarshal(kubeconfig, &conf); err != nil {
		t.Fatal(err)
	}
	decode := func(text string) []byte {
		data, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	cluster, user := conf.Clusters[0].Cluster, conf.Users[0].User
	pair, err := tls.X509KeyPair(decode(user.Cert), decode(user.Key))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(decode(cluster.CA))
	return cluster.Server, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}
}
