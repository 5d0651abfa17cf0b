//go:build e2e

package configure

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// What users add takes the place of the defaults that it excludes, and a new endpoint takes no token away from pods.
func arguments(t *testing.T, c *e2etest.Cluster) {
	var token string
	c.Eventually(upBudget, "the account of pods, which the controller manager makes, has a token", func() (err error) {
		token, err = c.Try("create", "token", "default", "--namespace=default")
		return err
	})
	token = strings.TrimSpace(token)
	review, err := json.Marshal(map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": map[string]any{"token": token}})
	if err != nil {
		t.Fatal(err)
	}
	accepted := func() error {
		out, err := c.TryWith(string(review), "create", "-o", "jsonpath={.status}", "-f", "-")
		if err == nil && !strings.Contains(out, `"authenticated":true`) {
			err = fmt.Errorf("TokenReview says %s", out)
		}
		return err
	}
	if err := accepted(); err != nil {
		t.Fatal(err)
	}
	c.Gbctl("patch", "mc", "--immediate", "-p", `
machine:
  files:
    - path: /var/lib/authz/config.yaml
      permissions: 0644
      content: |
        apiVersion: apiserver.config.k8s.io/v1
        kind: AuthorizationConfiguration
        authorizers:
          - {type: Node, name: node}
          - {type: RBAC, name: rbac}
cluster:
  controlPlane: {endpoint: "https://api.example.org:6443"}
  apiServer:
    extraArgs:
      authorization-config: /authz/config.yaml
      oidc-issuer-url: https://login.example.org
      oidc-client-id: kubernetes
      oidc-username-claim: email
    extraVolumes:
      - {hostPath: /var/lib/authz, mountPath: /authz, readonly: true}
`)
	c.Eventually(2*upBudget, "the API server runs with the arguments", func() error {
		pod, err := c.TryGbctl("read", "/etc/kubernetes/manifests/garboard-kube-apiserver.yaml")
		for _, want := range []string{"--authorization-config=/authz/config.yaml", "--service-account-issuer=https://api.example.org:6443"} {
			if err == nil && !strings.Contains(pod, want) {
				err = fmt.Errorf("%s isn't there", want)
			}
		}
		if err == nil {
			_, err = c.TryGbctl("health") // also of the pod with this configuration
		}
		return err
	})
	if err := accepted(); err != nil {
		t.Errorf("a token with the former endpoint: %v", err)
	}
	if out, err := c.TryGbctl("logs", "-k", "--tail", "200", "kube-proxy"); err == nil && strings.Contains(out, "Unauthorized") {
		t.Errorf("kube-proxy says:\n%s", out)
	}
	c.Gbctl("config", "rollback")
	c.Eventually(2*upBudget, "the node is healthy again", func() error { _, err := c.TryGbctl("health"); return err })
}
