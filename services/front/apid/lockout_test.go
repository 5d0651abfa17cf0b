package apid

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/garboard-os/garboard/api"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func readerNamed(t testing.TB, ca pki.CA, name string) *tls.Certificate {
	return shown(t, ca, pki.Leaf{CN: name, Orgs: []string{string(api.Reader)}})
}

// One certificate of a reader opens 256 streams that it never reads, and sends 430 calls
// whose bodies never come. Administrators are served as before, and so is another reader.
func TestAReaderLocksNobodyOut(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	b := newBench(t, normal(t, ca), nil)
	b.backend.close()
	_, l := realNode(t, b.socket, os.Getpid())
	for range 900 {
		l.Logger("kubelet").Info(strings.Repeat("x", 100))
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	cert := readerNamed(t, ca, "mallory")
	var refused, held atomic.Int32
	var attack sync.WaitGroup
	// send makes a call, and again when the gate has ended it, until it is refused.
	send := func(c *http.Client, method, path string) {
		attack.Go(func() {
			held.Add(1)
			defer held.Add(-1)
			for ctx.Err() == nil {
				var body io.Reader // which never comes
				if method == http.MethodPost {
					pipe, end := io.Pipe()
					defer end.Close()
					body = pipe
				}
				req, err := http.NewRequestWithContext(ctx, method, b.url(path), body)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/json")
				resp, err := c.Do(req)
				if err != nil {
					continue
				}
				defer resp.Body.Close()
				switch resp.StatusCode {
				case http.StatusTooManyRequests:
					refused.Add(1)
					return
				case http.StatusOK:
					<-ctx.Done() // without reading
				}
			}
		})
	}
	const streams, calls = 256, 430
	var c *http.Client
	for i := range streams + calls {
		if i%(maxStreams-4) == 0 {
			c = b.client(t, cert, true)
		}
		if i < streams {
			send(c, http.MethodGet, "/v1/logs/kubelet?follow=true")
			continue
		}
		send(c, http.MethodPost, version)
	}
	eventually.That(t, 30*time.Second, "the attack to have all that it gets", func() error {
		g := b.gate.guests
		g.mu.Lock()
		defer g.mu.Unlock()
		all := guestRooms[callRoom].each
		if g.used[callRoom] != all || int(refused.Load()+held.Load()) < streams || refused.Load() == 0 {
			return fmt.Errorf("%d of %d calls, %d are held, %d refused", g.used[callRoom], all, held.Load(), refused.Load())
		}
		return nil
	})
	for name, cert := range map[string]*tls.Certificate{"an administrator": admin(t, ca), "another reader": readerNamed(t, ca, "trent")} {
		client := garboardv1connect.NewResourceServiceClient(b.client(t, cert, true), b.url(""))
		for range 50 {
			began := time.Now()
			_, err := client.List(t.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: network.Addresses.Type()}))
			if took := time.Since(began); err != nil || took > eventually.Scale(5*time.Second) {
				t.Fatalf("%s: %v after %s", name, err, took)
			}
		}
		resp, err := b.client(t, cert, false).Get(b.url("/v1/logs/kubelet?tail=1"))
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: a log: %v %v", name, resp, err)
		}
		if n, err := io.Copy(io.Discard, resp.Body); n == 0 || err != nil {
			t.Errorf("%s: %d bytes of a log, %v", name, n, err)
		}
		resp.Body.Close()
	}
	stop()
	attack.Wait()
	eventually.That(t, 20*time.Second, "the reader to be forgotten", func() error {
		g := b.gate.guests
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.clients) > 0 || g.used != [rooms]int{} || !g.turns.TryAcquire(guestTurns) {
			return fmt.Errorf("%d guests use %v", len(g.clients), g.used)
		}
		g.turns.Release(guestTurns)
		return nil
	})
	m := methodOf(t, version)
	if err := ask(t.Context(), b.client(t, cert, true), b.url(""), m); err != nil && connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Errorf("the same reader, afterwards: %v", err)
	}
}

// hostileVariable makes the test program readers that ask as often as they can, until it is
// killed: its value is the address, and a folder with their certificates.
const hostileVariable = "GARBOARD_TEST_HOSTILE"

// Hostile readers, and what each of them does at once.
const (
	hostileReaders = 4
	hostileLists   = 48
	hostileLogs    = 12
	hostileRefused = 8
	hostileShare   = 17 // calls of one connection
)

func hostile(value string) int {
	f := strings.Fields(value)
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19); err != nil { // the attacker has computers of its own
		return 1
	}
	for i := range hostileReaders {
		name := filepath.Join(f[1], fmt.Sprint(i))
		cert, err := tls.LoadX509KeyPair(name, name)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		var transport *http.Transport
		for j := range hostileLists + hostileLogs + hostileRefused {
			if j%hostileShare == 0 {
				transport = &http.Transport{TLSClientConfig: clientTLS(&cert), Protocols: new(http.Protocols)}
				transport.Protocols.SetHTTP2(true)
			}
			client := &http.Client{Transport: transport}
			path, method, body := "/garboard.v1.ResourceService/List", http.MethodPost, `{"type":"`+network.Addresses.Type()+`"}`
			switch {
			case j >= hostileLists+hostileLogs:
				path = "/garboard.v1.FileService/Read"
			case j >= hostileLists:
				path, method, body = "/v1/logs/kubelet", http.MethodGet, ""
			}
			go func() {
				for {
					req, _ := http.NewRequest(method, "https://"+f[0]+path, strings.NewReader(body))
					req.Header.Set("Content-Type", "application/json")
					if resp, err := client.Do(req); err == nil {
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}
			}()
		}
	}
	select {}
}

// BenchmarkAdministratorAmongHostileReaders compares the calls of an administrator while
// nothing else goes on with those beside four readers at full rate, in one run.
func BenchmarkAdministratorAmongHostileReaders(b *testing.B) {
	p := startProgram(b)
	p.b.backend.close()
	_, l := realNode(b, p.b.socket, p.pid)
	for range 900 {
		l.Logger("kubelet").Info(strings.Repeat("x", 100))
	}
	client := garboardv1connect.NewResourceServiceClient(p.b.client(b, admin(b, p.ca), true), p.b.url(""))
	measure := func() (took []time.Duration) {
		for range 1000 {
			began := time.Now()
			if _, err := client.List(b.Context(), connect.NewRequest(&apiv1.ListResourcesRequest{Type: network.Addresses.Type()})); err != nil {
				b.Fatal(err)
			}
			took = append(took, time.Since(began))
			<-time.After(2 * time.Millisecond)
		}
		slices.Sort(took)
		return took
	}
	measure()
	idle := measure()
	stop := p.attack(b)
	<-time.After(2 * time.Second)
	before := p.cpu(b)
	began := time.Now()
	attacked := measure()
	share := float64(p.cpu(b)-before) / float64(time.Since(began))
	stop()
	for name, took := range map[string][]time.Duration{"idle": idle, "attacked": attacked} {
		b.ReportMetric(float64(took[len(took)/2])/1e6, name+"-p50-ms")
		b.ReportMetric(float64(took[len(took)*99/100])/1e6, name+"-p99-ms")
	}
	b.ReportMetric(float64(attacked[len(attacked)*99/100])/float64(idle[len(idle)*99/100]), "p99-ratio")
	b.ReportMetric(share, "gate-cpus")
	b.ReportMetric(mb(p.pss(b)), "pss-MB")
}

// attack starts the hostile readers.
func (p program) attack(t testing.TB) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	for i := range hostileReaders {
		cert, key, err := p.ca.Issue(pki.Leaf{CN: fmt.Sprintf("mallory%d", i), Orgs: []string{string(api.Reader)}, Client: true, Now: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), slices.Concat(cert, key), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), hostileVariable+"="+p.b.address+" "+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		if err := errors.Join(cmd.Process.Kill(), func() error { _ = cmd.Wait(); return nil }()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}
