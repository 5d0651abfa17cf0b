package doctor

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"

	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// etcdHealth is where etcd serves its health, in plain HTTP on loopback.
	etcdHealth = "http://127.0.0.1:2381"
	// maxList of members and alarms: a large cluster has seven.
	maxList = 1 << 20
)

// member is what this node's etcd returns about itself and its cluster.
type member struct {
	ready   answer
	members []etcdMember
	alarms  []string // NOSPACE, CORRUPT
	listed  error    // why the last two are not known
}

// etcdMember is one of the cluster, as etcd's JSON gateway encodes it.
type etcdMember struct {
	ID         string   `json:"ID"`
	Name       string   `json:"name"`
	PeerURLs   []string `json:"peerURLs"`
	ClientURLs []string `json:"clientURLs"`
	IsLearner  bool     `json:"isLearner"`
}

func (m etcdMember) String() string {
	learner := ""
	if m.IsLearner {
		learner = " (learner)"
	}
	return fmt.Sprintf("%s %s%s", m.Name, m.PeerURLs, learner)
}

func (d *Doctor) collectEtcd(ctx context.Context, _ *snapshot) func(*snapshot) {
	m := &member{}
	var wg sync.WaitGroup
	wg.Go(func() { m.ready = d.askEtcd(ctx) })
	wg.Go(func() { m.listed = d.listEtcd(ctx, m) }) // without a leader the first one hangs, and this doesn't
	wg.Wait()
	return func(s *snapshot) { s.etcd = m }
}

func (d *Doctor) askEtcd(ctx context.Context) answer {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	a := answer{from: d.o.health + readyPath}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.from, nil)
	if err != nil {
		a.err = err
		return a
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer)) // the code is enough
	a.code, a.body = resp.StatusCode, string(body)
	return a
}

// listEtcd asks for members and alarms through etcd's JSON gateway, of the member
// itself: a cluster without a leader still answers that.
func (d *Doctor) listEtcd(ctx context.Context, m *member) error {
	status, err := controlplane.EtcdStatuses.Get(d.o.Store, controlplane.EtcdID)
	if err != nil {
		return err
	}
	keys, err := secrets.Etcd.Get(d.o.Store, secrets.EtcdID)
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(keys.Spec.ClientCert, keys.Spec.ClientKey)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(keys.Spec.CA)
	client := &http.Client{Timeout: askTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{pair}},
	}}
	var members struct {
		Members []etcdMember `json:"members"`
	}
	if err := post(ctx, client, status.Spec.Endpoint+"/v3/cluster/member/list", `{"linearizable":false}`, &members); err != nil {
		return err
	}
	m.members = members.Members
	var alarms struct {
		Alarms []struct {
			Alarm string `json:"alarm"`
		} `json:"alarms"`
	}
	if err := post(ctx, client, status.Spec.Endpoint+"/v3/maintenance/alarm", `{"action":"GET"}`, &alarms); err != nil {
		return err
	}
	for _, a := range alarms.Alarms {
		m.alarms = append(m.alarms, a.Alarm)
	}
	return nil
}

func post(ctx context.Context, client *http.Client, url, body string, out any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader([]byte(body)))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxList))
	if err != nil {
		return fmt.Errorf("post %s: read answer: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("post %s: %s: %s", url, resp.Status, bytes.TrimSpace(data))
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("post %s: decode answer: %w", url, err)
	}
	return nil
}
