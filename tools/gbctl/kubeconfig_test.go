package main

import (
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

// A node in the hands of somebody else must not get a program run, or a file read,
// on the machine of an administrator.
func TestKubeconfigOfAHostileNode(t *testing.T) {
	ca, err := pki.NewKubernetesCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	data, _, err := config.AdminKubeconfig("home", "https://10.5.0.2:6443", ca, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := harmless(data); err != nil {
		t.Fatalf("a real one: %v", err)
	}
	good := string(data)
	for name, bad := range map[string]string{
		"a program":        strings.Replace(good, "user:\n        client-cert", "user:\n        exec: {apiVersion: client.authentication.k8s.io/v1, command: sh}\n        client-cert", 1),
		"an old program":   strings.Replace(good, "user:\n        client-cert", "user:\n        auth-provider: {name: gcp}\n        client-cert", 1),
		"a file":           strings.Replace(good, "user:\n        client-cert", "user:\n        tokenFile: /etc/passwd\n        client-cert", 1),
		"a proxy":          strings.Replace(good, "server:", "proxy-url: http://10.0.0.1\n        server:", 1),
		"users twice":      good + "users: [{name: x, user: {exec: {command: sh}}}]\n",
		"behind an alias":  strings.Replace(good, "apiVersion: v1", "kind: &a {exec: {command: sh}}\napiVersion: v1", 1) + "users: [{name: x, user: *a}]\n",
		"no list of users": "apiVersion: v1\nclusters: []\ncontexts: []\nusers: {}\n",
		"no mapping":       "[]",
	} {
		if bad == good {
			t.Fatalf("%s: the test changes nothing of %s", name, good)
		}
		if err := harmless([]byte(bad)); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
